//! A proxy between kubelet and the engine's CRI image service, which reads the credentials of kubelet's pulls.
//!
//! Requests are passed on unchanged. Only pull requests are parsed, so only these are buffered in memory.

use std::convert::Infallible;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http_body_util::{BodyExt as _, Full, Limited};
use oci::registry::Secret;
use prost::Message as _;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Context, Poll, Service};
use tonic::server::NamedService;
use tonic::transport::{Channel, Endpoint};

use crate::snapshots::lazy::pull::{EngineImages, PullSecret};

/// Source: Kubernetes' `cri-api/pkg/apis/runtime/v1/api.proto`.
const SERVICE: &str = "runtime.v1.ImageService";
const PULL: &str = "/runtime.v1.ImageService/PullImage";

/// Source: gRPC's `PROTOCOL-HTTP2.md`.
const STATUS: &str = "grpc-status";

/// Largest pull request, in bytes, which is gRPC's default limit.
const REQUEST_MAX: usize = 4 << 20;

/// The fields of a pull request that are used. Source: as above.
#[derive(Clone, PartialEq, prost::Message)]
struct PullImageRequest {
    #[prost(message, optional, tag = "1")]
    image: Option<ImageSpec>,
    #[prost(message, optional, tag = "2")]
    auth: Option<AuthConfig>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ImageSpec {
    #[prost(string, tag = "1")]
    image: String,
}

#[derive(Clone, PartialEq, prost::Message)]
#[prost(skip_debug)]
struct AuthConfig {
    #[prost(string, tag = "1")]
    username: String,
    #[prost(string, tag = "2")]
    password: String,
    /// Base64 of `username:password`.
    #[prost(string, tag = "3")]
    auth: String,
}

impl fmt::Debug for AuthConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AuthConfig")
    }
}

impl AuthConfig {
    /// Returns user name and password. Tokens are not used, because few registries give any to kubelet.
    fn password(self) -> Option<(String, String)> {
        if !self.username.is_empty() {
            return Some((self.username, self.password));
        }
        let text = String::from_utf8(STANDARD.decode(self.auth.trim()).ok()?).ok()?;
        let (user, password) = text.split_once(':')?;
        (!user.is_empty()).then(|| (user.to_owned(), password.to_owned()))
    }
}

/// Returns the credentials in a pull request in gRPC's framing: a byte for compression, four for the length, and the
/// message.
fn secret(request: &[u8]) -> Option<PullSecret> {
    let message = request.strip_prefix(&[0])?.get(4..)?;
    let PullImageRequest { image, auth } = PullImageRequest::decode(message).ok()?;
    let (user, password) = auth?.password()?;
    Some(PullSecret { image: image?.image, user, password: Secret::new(password) })
}

/// The proxy service.
#[derive(Clone)]
pub(in crate::snapshots) struct ImageService {
    engine: Channel,
    images: Arc<EngineImages>,
}

impl ImageService {
    /// Creates the proxy. The engine need not run yet.
    pub(in crate::snapshots) fn new(
        engine: &Path,
        images: Arc<EngineImages>,
    ) -> Result<Self, tonic::transport::Error> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", engine.display()))?;
        Ok(Self { engine: endpoint.connect_lazy(), images })
    }

    async fn pass(self, request: Request<Body>) -> Result<Response<Body>, Status> {
        match request.uri().path() {
            PULL => self.pull(request).await,
            _ => self.call_engine(request).await,
        }
    }

    async fn call_engine(&self, request: Request<Body>) -> Result<Response<Body>, Status> {
        let failed = |error: tonic::transport::Error| {
            let mut message = format!("the engine: {error}");
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                message += &format!(": {error}");
                cause = error.source();
            }
            Status::unavailable(message)
        };
        let mut engine = self.engine.clone();
        std::future::poll_fn(|context| engine.poll_ready(context)).await.map_err(failed)?;
        engine.call(request).await.map_err(failed)
    }

    /// Passes on a pull request. The engine requests layers during the pull, so the credentials are stored before it.
    /// If the pull fails, the earlier credentials are restored.
    async fn pull(&self, request: Request<Body>) -> Result<Response<Body>, Status> {
        let (head, body) = request.into_parts();
        let body = Limited::new(body, REQUEST_MAX).collect().await;
        let body = body.map_err(|error| Status::invalid_argument(error.to_string()))?.to_bytes();
        let secret = secret(&body);
        let request = Request::from_parts(head, Body::new(Full::new(body)));
        let Some(secret) = secret else { return self.call_engine(request).await };
        let image = secret.image.clone();
        let kept = self.aside(move |images| images.keep(&secret)).await;
        let (answer, is_pulled) = match self.call_engine(request).await {
            Ok(answer) => whole(answer).await,
            Err(status) => (Err(status), false),
        };
        if let (false, Some(before)) = (is_pulled, kept) {
            self.aside(move |images| images.restore(&image, before)).await;
        }
        answer
    }

    /// Runs blocking work on files on another thread.
    async fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce(&EngineImages) -> T + Send + 'static,
    ) -> Option<T> {
        let images = Arc::clone(&self.images);
        tokio::task::spawn_blocking(move || work(&images)).await.ok()
    }
}

/// Reads a response completely, and returns whether its status is OK.
async fn whole(answer: Response<Body>) -> (Result<Response<Body>, Status>, bool) {
    let (head, body) = answer.into_parts();
    let body = match Limited::new(body, REQUEST_MAX).collect().await {
        Ok(body) => body,
        Err(error) => return (Err(Status::internal(error.to_string())), false),
    };
    let said = body.trailers().and_then(|it| it.get(STATUS)).or_else(|| head.headers.get(STATUS));
    let is_well = said.is_some_and(|it| it == "0");
    // An error response has only a header, and must be passed on without a body, because a client expects trailers
    // after a body.
    let is_header_alone = body.trailers().is_none() && head.headers.contains_key(STATUS);
    let body = if is_header_alone { Body::empty() } else { Body::new(body) };
    (Ok(Response::from_parts(head, body)), is_well)
}

impl NamedService for ImageService {
    const NAME: &'static str = SERVICE;
}

impl Service<Request<Body>> for ImageService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let this = self.clone();
        Box::pin(
            async move { Ok(this.pass(request).await.unwrap_or_else(|status| status.into_http())) },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Engines send errors in the header only. A client loses the message if the header does not end the response.
    #[test]
    fn an_error_goes_on_as_it_came() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let refused = Status::not_found("no such tag").into_http();
        let (answer, is_well) = runtime.block_on(whole(refused));
        let answer = answer.unwrap();
        assert!(!is_well && tonic::codegen::Body::is_end_stream(answer.body()));
        assert_eq!(answer.headers().get(STATUS).unwrap(), "5");
    }

    fn request(auth: AuthConfig) -> Vec<u8> {
        let image = Some(ImageSpec { image: "r.example/app:1".to_owned() });
        let message = PullImageRequest { image, auth: Some(auth) }.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0], &length[..], &message].concat()
    }

    fn auth(username: &str, password: &str, auth: &str) -> AuthConfig {
        let [username, password, auth] = [username, password, auth].map(ToOwned::to_owned);
        AuthConfig { username, password, auth }
    }

    #[test]
    fn names_and_passwords_are_heard() {
        let expect = PullSecret {
            image: "r.example/app:1".to_owned(),
            user: "me".to_owned(),
            password: Secret::new("p:w".to_owned()),
        };
        // Made with `printf me:p:w | base64`.
        for given in [auth("me", "p:w", ""), auth("", "", "bWU6cDp3")] {
            assert_eq!(secret(&request(given)), Some(expect.clone()));
        }
        for nothing in
            [auth("", "", ""), auth("", "p", ""), auth("", "", "!"), auth("", "", "bWU=")]
        {
            assert_eq!(secret(&request(nothing)), None);
        }
        // A client may send arbitrary bytes.
        let whole = request(auth("me", "p", ""));
        for length in 0..whole.len() {
            assert!(secret(&whole[..length]).is_none_or(|it| it.user == "me"), "{length}");
        }
        assert_eq!(secret(&[&[1][..], &whole[1..]].concat()), None);
        assert_eq!(secret(&[0xff; 100]), None);
    }
}
