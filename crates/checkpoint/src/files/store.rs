//! An object store: what is asked of it, each with a deadline.
//!
//! CK-5: in a store, all that a manifest names is of one attempt to save: it is there before the manifest is, is never
//! written again, and goes after the manifest.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::{Stream, StreamExt, TryStreamExt, stream};
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path as Key;
use object_store::{
    BackoffConfig, ClientConfigKey, GetOptions, ObjectStore, ObjectStoreExt, PutPayload,
    RetryConfig,
};

use super::Listed;
use super::client::Connector;
use super::error::StoreError;
use super::layout::Address;
use super::runtime::{Runtime, Waiting};
use crate::directory::MANIFEST_BYTES;
use crate::error::CheckpointError;

/// How long one attempt at a request may take, unless `AWS_TIMEOUT` says otherwise.
const TIMEOUT: &str = "60 seconds";
/// How often a request is tried again, and until when.
const RETRIES: usize = 5;
const RETRY_TIMEOUT: Duration = Duration::from_secs(100);

/// The most entries of a folder, and the most bytes of their names: some 20 MiB of memory.
pub(super) const MOST_LISTED: usize = 100_000;
pub(super) const MOST_LISTED_BYTES: usize = 16 << 20;
/// The most pages, which have a thousand entries each unless a store makes them shorter.
const MOST_PAGES: usize = 10_000;

/// A bucket of a store, to which the first request connects.
#[derive(Debug)]
pub(crate) struct Store {
    address: PathBuf,
    connection: OnceLock<Arc<Connection>>,
    /// Whether a manifest may be there of which it is not known.
    unsure: AtomicBool,
    /// Whether a request to write has had no answer since this was last cleared.
    lost_answers: Arc<AtomicBool>,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) bucket: AmazonS3,
    pub(super) runtime: Runtime,
}

impl Store {
    pub(super) fn new(address: &Path) -> Self {
        Self {
            address: address.to_owned(),
            connection: OnceLock::new(),
            unsure: AtomicBool::new(false),
            lost_answers: Arc::default(),
        }
    }

    /// What is directly in a folder. A store that tells of more than [`MOST_LISTED`], or of the same page again, is refused.
    pub(crate) fn list(&self, folder: &Path) -> Result<Vec<Listed>, CheckpointError> {
        let listed = self.try_ask(folder, |connection, key| {
            let bucket = connection.bucket.clone();
            connection.runtime.start(listed(bucket, key))
        });
        let mut all = listed.and_then(|all| all).map_err(failed("list", folder))?;
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// All bytes of an object that has so many at most; `None` if it is not there.
    pub(super) fn read(
        &self,
        path: &Path,
        allowed: u64,
    ) -> Result<Option<Vec<u8>>, CheckpointError> {
        let read = self.try_ask(path, |connection, key| {
            let bucket = connection.bucket.clone();
            connection.runtime.start(async move {
                let found = bucket.get(&key).await?;
                if found.meta.size > allowed {
                    return Ok(None); // it is not even begun
                }
                at_most(found.into_stream(), allowed).await
            })
        });
        match read {
            Ok(Some(bytes)) => Ok(Some(bytes)),
            Ok(None) => Err(failed("read", path)(StoreError::Large(allowed))),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(failed("read", path)(error)),
        }
    }

    /// So many bytes of an object, from one on; `None` if it is not there.
    pub(super) fn read_range(
        &self,
        path: &Path,
        begin: u64,
        into: &mut [u8],
    ) -> Result<Option<()>, CheckpointError> {
        let length = into.len();
        let read = self.try_ask(path, |connection, key| {
            let bucket = connection.bucket.clone();
            let options = GetOptions::new().with_range(Some(begin..begin + length as u64));
            connection.runtime.start(async move {
                let mut stream = bucket.get_opts(&key, options).await?.into_stream();
                let mut bytes = Vec::with_capacity(length);
                while let Some(some) = stream.try_next().await? {
                    bytes.extend_from_slice(&some[..some.len().min(length - bytes.len())]);
                    if bytes.len() == length {
                        break;
                    }
                }
                Ok(bytes)
            })
        });
        match read {
            Ok(bytes) if bytes.len() == length => {
                into.copy_from_slice(&bytes);
                Ok(Some(()))
            }
            Ok(bytes) => Err(failed("read", path)(StoreError::Short(bytes.len()))),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(failed("read", path)(error)),
        }
    }

    /// Writes an object, which is there with all its bytes or not at all. One that is there is replaced.
    pub(crate) fn write(&self, path: &Path, bytes: Vec<u8>) -> Result<(), CheckpointError> {
        self.ask("write", path, |connection, key| {
            let bucket = connection.bucket.clone();
            let payload = PutPayload::from(bytes);
            connection
                .runtime
                .start(async move { bucket.put(&key, payload).await.map(|_| ()) })
        })
    }

    /// Writes a manifest. Where an answer got lost, the store may have it all the same: then it is looked for.
    ///
    /// # Errors
    ///
    /// The store refuses, and has it not; or this is not known ([`CheckpointError::Unsure`]).
    pub(crate) fn write_manifest(&self, path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.lost_answers.store(false, Ordering::Relaxed);
        let Err(error) = self.write(path, bytes.to_vec()) else {
            return Ok(());
        };
        // An attempt without an answer may still be on its way.
        let may_come = self.lost_answers.load(Ordering::Relaxed) || error.is_without_answer();
        match self.read(path, MANIFEST_BYTES) {
            Ok(Some(found)) if found == bytes => Ok(()),
            Ok(_) if !may_come => Err(error),
            _ => {
                self.unsure.store(true, Ordering::Relaxed);
                Err(CheckpointError::Unsure {
                    folder: path.parent().unwrap_or(path).to_owned(),
                    source: Box::new(error),
                })
            }
        }
    }

    /// Whether a manifest may be there, now or in a moment, of which it is not known: then nothing goes that it would name.
    pub(crate) fn is_unsure(&self) -> bool {
        self.unsure.load(Ordering::Relaxed)
    }

    /// How many bytes an object has; `None` if it is not there.
    pub(super) fn size(&self, path: &Path) -> Result<Option<u64>, CheckpointError> {
        let size = self.try_ask(path, |connection, key| {
            let bucket = connection.bucket.clone();
            connection
                .runtime
                .start(async move { bucket.head(&key).await.map(|found| found.size) })
        });
        match size {
            Ok(size) => Ok(Some(size)),
            Err(error) if error.is_absent() => Ok(None),
            Err(error) => Err(failed("look at", path)(error)),
        }
    }

    /// Removes objects of a folder, which may be gone already.
    pub(crate) fn remove(
        &self,
        folder: &Path,
        names: impl IntoIterator<Item = String>,
    ) -> Result<(), CheckpointError> {
        let keys: Result<Vec<Key>, StoreError> = names
            .into_iter()
            .map(|name| key_of(&folder.join(name)))
            .collect();
        let keys = keys.map_err(failed("remove objects of", folder))?;
        if keys.is_empty() {
            return Ok(());
        }
        self.ask("remove objects of", folder, |connection, _| {
            let bucket = connection.bucket.clone();
            let keys = stream::iter(keys.into_iter().map(Ok)).boxed();
            connection.runtime.start(async move {
                let mut removed = bucket.delete_stream(keys);
                while let Some(one) = removed.next().await {
                    match one {
                        Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                        Err(error) => return Err(error),
                    }
                }
                Ok(())
            })
        })
    }

    fn ask<T>(
        &self,
        action: &'static str,
        path: &Path,
        begin: impl FnOnce(&Connection, Key) -> Waiting<T>,
    ) -> Result<T, CheckpointError> {
        self.try_ask(path, begin).map_err(failed(action, path))
    }

    fn try_ask<T>(
        &self,
        path: &Path,
        begin: impl FnOnce(&Connection, Key) -> Waiting<T>,
    ) -> Result<T, StoreError> {
        let connection = self.connection()?;
        begin(&connection, key_of(path)?).wait()
    }

    pub(super) fn connection(&self) -> Result<Arc<Connection>, StoreError> {
        if let Some(connection) = self.connection.get() {
            return Ok(Arc::clone(connection));
        }
        let text = self.address.to_str();
        let text = text.ok_or(StoreError::Address("it is no text"))?;
        let address = Address::parse(text).map_err(StoreError::Address)?;
        let connection = Connection {
            bucket: connect(address.bucket, &self.lost_answers).map_err(StoreError::Answer)?,
            runtime: Runtime::new().map_err(StoreError::Thread)?,
        };
        Ok(Arc::clone(
            self.connection.get_or_init(|| Arc::new(connection)),
        ))
    }
}

/// What is directly in a folder, page by page.
async fn listed(
    bucket: AmazonS3,
    folder: Key,
) -> object_store::Result<Result<Vec<Listed>, StoreError>> {
    let prefix = format!("{folder}/");
    let prefix = (prefix != "/").then_some(&*prefix);
    let (mut all, mut bytes, mut token) = (Vec::new(), 0, None);
    for _ in 0..MOST_PAGES {
        let options = PaginatedListOptions {
            delimiter: Some("/".into()),
            page_token: token.clone(),
            ..PaginatedListOptions::default()
        };
        let page = bucket.list_paginated(prefix, options).await?;
        let folders = page.result.common_prefixes.iter().map(|key| (key, None));
        let objects = page.result.objects.iter();
        let objects = objects.map(|object| (&object.location, Some(object.size)));
        for (key, size) in folders.chain(objects) {
            let Some(name) = key.filename().filter(|_| *key != folder) else {
                continue; // what some tools write for a folder itself
            };
            bytes += name.len();
            if all.len() == MOST_LISTED || bytes > MOST_LISTED_BYTES {
                return Ok(Err(StoreError::LongList));
            }
            all.push(Listed {
                name: name.to_owned(),
                bytes: size,
            });
        }
        match page.page_token {
            None => return Ok(Ok(all)),
            Some(next) if token.as_ref() == Some(&next) => return Ok(Err(StoreError::SamePage)),
            Some(next) => token = Some(next),
        }
    }
    Ok(Err(StoreError::LongList))
}

/// The bytes that a store answers; `None` if they are more than that, whatever it has said.
async fn at_most<B: AsRef<[u8]>>(
    mut stream: impl Stream<Item = object_store::Result<B>> + Unpin,
    allowed: u64,
) -> object_store::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    while let Some(some) = stream.try_next().await? {
        if (bytes.len() + some.as_ref().len()) as u64 > allowed {
            return Ok(None);
        }
        bytes.extend_from_slice(some.as_ref());
    }
    Ok(Some(bytes))
}

/// The key of what is at a path of a store.
pub(super) fn key_of(path: &Path) -> Result<Key, StoreError> {
    let text = path.to_str().ok_or(StoreError::Address("it is no text"))?;
    let address = Address::parse(text).map_err(StoreError::Address)?;
    Key::parse(address.key).map_err(|error| StoreError::Answer(error.into()))
}

/// For `map_err`: what was asked of the store, and of what.
pub(super) fn failed(
    action: &'static str,
    path: &Path,
) -> impl FnOnce(StoreError) -> CheckpointError {
    move |source| CheckpointError::Store {
        action,
        path: path.to_owned(),
        source: Box::new(source),
    }
}

/// A client by the environment's `AWS_*` variables. It sends nothing yet.
fn connect(bucket: &str, lost_answers: &Arc<AtomicBool>) -> object_store::Result<AmazonS3> {
    // An error says that the process has a provider already, which is then used.
    rustls::crypto::ring::default_provider()
        .install_default()
        .ok();
    let retries = RetryConfig {
        backoff: BackoffConfig::default(),
        max_retries: RETRIES,
        retry_timeout: RETRY_TIMEOUT,
    };
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_http_connector(Connector(Arc::clone(lost_answers)))
        .with_retry(retries);
    if env::var_os("AWS_TIMEOUT").is_none() {
        builder = builder.with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), TIMEOUT);
    }
    let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint]
        .iter()
        .find_map(|key| builder.get_config_value(key));
    if endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")) {
        builder = builder.with_allow_http(true);
    }
    builder.build()
}
