//! Blobs of an engine, as they come from its content store.

use std::io::{self, Read};
use std::path::PathBuf;

use image::digest::Digest;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tonic::Request;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};

use super::api::content::content_client::ContentClient;
use super::api::content::{ReadContentRequest, ReadContentResponse};

/// The header in which containerd has the namespace of a call. Source: its package `namespaces`.
pub(super) const NAMESPACE: &str = "containerd-namespace";

/// Messages that wait to be read: containerd's have up to 1 MiB.
const AHEAD: usize = 4;

/// The content store of an engine.
#[derive(Debug)]
pub(super) struct ContentStore {
    /// The engine's socket.
    pub(super) socket: PathBuf,
}

impl ContentStore {
    /// Begins to read a blob. The engine looks it up in a namespace of its own. Whether the bytes are the right ones is for
    /// the reader to find out.
    pub(super) async fn read(
        &self,
        digest: &Digest,
        namespace: Option<MetadataValue<Ascii>>,
    ) -> io::Result<ContentReader> {
        let mut request =
            Request::new(ReadContentRequest { digest: digest.to_string(), ..Default::default() });
        if let Some(namespace) = namespace {
            request.metadata_mut().insert(NAMESPACE, namespace);
        }
        let mut client = ContentClient::new(self.connect().await?);
        let answer = client.read(request).await;
        let mut parts = answer.map_err(|status| failed(&status))?.into_inner();
        let (give, take) = mpsc::channel(AHEAD);
        tokio::spawn(async move {
            loop {
                let part = match parts.message().await {
                    Ok(Some(part)) => Ok(part),
                    Ok(None) => return,
                    Err(status) => Err(failed(&status)),
                };
                let is_last = part.is_err();
                // Nobody reads on.
                if give.send(part).await.is_err() || is_last {
                    return;
                }
            }
        });
        Ok(ContentReader {
            parts: take,
            part: Vec::new(),
            at: 0,
            next: 0,
            runtime: Handle::current(),
        })
    }

    async fn connect(&self) -> io::Result<Channel> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", self.socket.display()));
        endpoint.map_err(io::Error::other)?.connect().await.map_err(|error| {
            io::Error::other(format!(
                "cannot reach the engine at {}: {error}; `--engine PATH` says where it listens",
                self.socket.display()
            ))
        })
    }
}

fn failed(status: &tonic::Status) -> io::Error {
    io::Error::other(format!("the engine's content store: {}", status.message()))
}

/// A blob, read where threads may wait.
#[derive(Debug)]
pub(super) struct ContentReader {
    parts: mpsc::Receiver<io::Result<ReadContentResponse>>,
    part: Vec<u8>,
    /// How much of the part is read.
    at: usize,
    /// Where the next part begins in the blob.
    next: i64,
    runtime: Handle,
}

impl Read for ContentReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.part.len() {
            let Some(part) = self.runtime.block_on(self.parts.recv()) else { return Ok(0) };
            let part = part?;
            if part.offset != self.next {
                return Err(io::Error::other("the engine's content store leaves out some bytes"));
            }
            self.next += i64::try_from(part.data.len()).unwrap_or_default();
            (self.part, self.at) = (part.data, 0);
        }
        let count = (&self.part[self.at..]).read(buffer)?;
        self.at += count;
        Ok(count)
    }
}
