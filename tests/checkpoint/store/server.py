"""A server that speaks S3, on this machine, for as long as a test needs it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import boto3

from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ports import next_port

KEYS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class Server:
    """The server, as a process; what it stores goes with it.

    Attributes:
        port: Where it listens, on the loopback interface.
        url: Its address.
        process: The process.
    """

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        """Start it, with variables of its environment."""
        self.port = next_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            env={**os.environ, **(settings or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + HANG_SECONDS
        while not self._answers():
            assert self.process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach it."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.url, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def client(self) -> Any:
        """Another library's client."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=KEYS["AWS_REGION"],
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


class Bucket:
    """A bucket of a server, with the directory of checkpoints that a test uses.

    Attributes:
        client: Another library's client.
        name: The bucket.
        path: The directory's address.
    """

    PREFIX = "some/pre fix"

    def __init__(self, server: Server, name: str) -> None:
        """Create it."""
        self.client = server.client()
        self.name = name
        self.client.create_bucket(Bucket=name)
        self.path = f"s3://{name}/{self.PREFIX}"

    def objects(self) -> dict[str, int]:
        """The sizes of all objects of the directory, by their names in it."""
        listed = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return {one["Key"].removeprefix(f"{self.PREFIX}/"): one["Size"] for one in listed}

    def uploads(self) -> list[str]:
        """The names of objects whose uploads go on."""
        listed = self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return [one["Key"].removeprefix(f"{self.PREFIX}/") for one in listed]

    def get(self, name: str) -> bytes:
        """Return an object's bytes."""
        return bytes(self.client.get_object(Bucket=self.name, Key=f"{self.PREFIX}/{name}")["Body"].read())

    def put(self, name: str, content: bytes) -> None:
        """Replace an object."""
        self.client.put_object(Bucket=self.name, Key=f"{self.PREFIX}/{name}", Body=content)

    def delete(self, name: str) -> None:
        """Remove an object."""
        self.client.delete_object(Bucket=self.name, Key=f"{self.PREFIX}/{name}")
