//! The HTTP client by which a store is asked: it trusts no answer more than it must.
//!
//! - No redirection is followed. The client of `object_store` follows them with all headers but `Authorization`, so that the
//!   token of a session would reach whatever host an answer names.
//! - Of an answer that is no object, a bounded number of bytes is kept; of an error, what tells why.

use std::error::Error as StdError;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::TryStreamExt;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions, Error};
use reqwest::redirect::Policy;
use reqwest::tls::Certificate;
use reqwest::{Client, ClientBuilder, NoProxy, Proxy};

/// What is kept of the body of an error: S3's errors are a few hundred bytes of XML.
const MOST_ERROR_BYTES: usize = 4 << 10;

/// The most bytes of an answer that is no object, such as a page of a list: a thousand entries of some kilobytes.
const MOST_ANSWER_BYTES: usize = 16 << 20;

/// Answers of a gateway that tell nothing of the store behind it.
const UNSURE: [u16; 2] = [502, 504];

type Setter = fn(ClientBuilder, Duration) -> ClientBuilder;

type Cause = Box<dyn StdError + Send + Sync>;

/// Makes such clients, which set this when a request to write has had no answer: it may be done yet.
#[derive(Debug)]
pub(super) struct Connector(pub(super) Arc<AtomicBool>);

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = client(options).map_err(|source| Error::Generic {
            store: "HTTP client",
            source,
        })?;
        Ok(HttpClient::new(Guarded {
            client,
            lost_answers: Arc::clone(&self.0),
        }))
    }
}

/// The client that `object_store` would make of the same options, which follows nothing.
fn client(options: &ClientOptions) -> Result<Client, Cause> {
    use ClientConfigKey as Key;

    let text = |key| options.get_config_value(&key);
    let is_set = |key| text(key).map_or(Ok(false), |value| truth(&value));
    let time = |key| text(key).map(|value| duration(&value)).transpose();
    let mut builder = ClientBuilder::new()
        .redirect(Policy::none())
        .https_only(!is_set(Key::AllowHttp)?)
        .danger_accept_invalid_certs(is_set(Key::AllowInvalidCertificates)?)
        .http2_keep_alive_while_idle(is_set(Key::Http2KeepAliveWhileIdle)?)
        .http2_max_frame_size(number(text(Key::Http2MaxFrameSize))?)
        .user_agent(text(Key::UserAgent).unwrap_or_else(|| "shardwright".to_owned()));
    if let Some(url) = text(Key::ProxyUrl) {
        let excluded = text(Key::ProxyExcludes).and_then(|hosts| NoProxy::from_string(&hosts));
        builder = builder.proxy(Proxy::all(url)?.no_proxy(excluded));
    }
    let certificates =
        text(Key::ProxyCaCertificate).map(|pem| Certificate::from_pem(pem.as_bytes()));
    let certificates = certificates.transpose()?;
    builder = if is_set(Key::NoSystemCertificates)? {
        builder.tls_certs_only(certificates)
    } else {
        builder.tls_certs_merge(certificates)
    };
    let times: [(Key, Setter); 6] = [
        (Key::Timeout, ClientBuilder::timeout),
        (Key::ConnectTimeout, ClientBuilder::connect_timeout),
        (Key::ReadTimeout, ClientBuilder::read_timeout),
        (Key::PoolIdleTimeout, |builder, time| {
            builder.pool_idle_timeout(time)
        }),
        (Key::Http2KeepAliveInterval, |builder, time| {
            builder.http2_keep_alive_interval(time)
        }),
        (
            Key::Http2KeepAliveTimeout,
            ClientBuilder::http2_keep_alive_timeout,
        ),
    ];
    for (key, set) in times {
        if let Some(time) = time(key)? {
            builder = set(builder, time);
        }
    }
    if let Some(most) = number(text(Key::PoolMaxIdlePerHost))? {
        builder = builder.pool_max_idle_per_host(most);
    }
    if is_set(Key::Http1Only)? {
        builder = builder.http1_only();
    }
    if is_set(Key::Http2Only)? {
        builder = builder.http2_prior_knowledge();
    }
    Ok(builder.build()?)
}

fn truth(value: &str) -> Result<bool, Cause> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" | "y" => Ok(true),
        "0" | "false" | "off" | "no" | "n" => Ok(false),
        _ => Err(format!("{value:?} is neither true nor false").into()),
    }
}

fn duration(value: &str) -> Result<Duration, Cause> {
    humantime::parse_duration(value).map_err(|error| format!("{value:?}: {error}").into())
}

fn number<T: FromStr>(value: Option<String>) -> Result<Option<T>, Cause> {
    let parse = |value: String| {
        value
            .parse()
            .map_err(|_| format!("{value:?} is no such number"))
    };
    Ok(value.map(parse).transpose()?)
}

/// A client whose answers are bounded.
#[derive(Debug)]
struct Guarded {
    client: Client,
    lost_answers: Arc<AtomicBool>,
}

/// An answer that is not taken.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(
        "it redirects to {0:?}, which is not followed: the request's credentials would go along"
    )]
    Redirection(String),
    #[error("its answer has more than {MOST_ANSWER_BYTES} bytes")]
    TooLong,
}

#[async_trait]
impl HttpService for Guarded {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_of_object = request.method().as_str() == "GET"
            && !request
                .uri()
                .query()
                .is_some_and(|query| query.contains("list-type="));
        let writes = request.method().as_str() == "PUT";
        let answer = self.client.call(request).await;
        let is_lost = match &answer {
            Ok(answer) => UNSURE.contains(&answer.status().as_u16()),
            Err(error) => error.kind() != HttpErrorKind::Connect,
        };
        if writes && is_lost {
            self.lost_answers.store(true, Ordering::Relaxed);
        }
        let answer = answer?;
        let status = answer.status();
        if let (true, Some(to)) = (status.is_redirection(), answer.headers().get("location")) {
            let to: String = String::from_utf8_lossy(to.as_bytes())
                .chars()
                .take(200)
                .collect();
            return Err(HttpError::new(
                HttpErrorKind::Unknown,
                Refused::Redirection(to),
            ));
        }
        if status.is_success() && is_of_object {
            return Ok(answer);
        }
        let (parts, body) = answer.into_parts();
        let body = if status.is_success() {
            let (bytes, is_whole) = beginning(body, MOST_ANSWER_BYTES).await?;
            if !is_whole {
                return Err(HttpError::new(HttpErrorKind::Unknown, Refused::TooLong));
            }
            HttpResponseBody::from(bytes)
        } else {
            let (bytes, _) = beginning(body, MOST_ERROR_BYTES).await?;
            HttpResponseBody::from(String::from_utf8_lossy(&bytes).into_owned())
        };
        Ok(HttpResponse::from_parts(parts, body))
    }
}

/// So many bytes of a body at most, and whether that is all of it. The rest is not waited for.
async fn beginning(body: HttpResponseBody, most: usize) -> Result<(Vec<u8>, bool), HttpError> {
    let (mut stream, mut bytes) = (body.bytes_stream(), Vec::new());
    while let Some(some) = stream.try_next().await? {
        let room = most - bytes.len();
        bytes.extend_from_slice(&some[..some.len().min(room)]);
        if some.len() > room {
            return Ok((bytes, false));
        }
    }
    Ok((bytes, true))
}
