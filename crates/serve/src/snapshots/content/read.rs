//! Reads blobs from an engine's content store.

use std::collections::HashMap;
use std::io::{self, Read};

use image::digest::Digest;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::call::{AHEAD, ContentCall, ContentError, ContentFault, ContentStore, EngineHeaders};
use crate::snapshots::cancellation::CancelToken;
use containerd_api::content::content_client::ContentClient;
use containerd_api::content::{InfoRequest, ReadContentRequest, ReadContentResponse};

impl ContentStore {
    /// Returns the labels of a blob.
    pub(in super::super) async fn labels(
        &self,
        digest: &Digest,
        headers: &EngineHeaders,
        wanted: &CancelToken,
    ) -> Result<HashMap<String, String>, ContentError> {
        let call = self.call(format!("request labels of {digest} from"), headers, wanted);
        let connection = call.connect().await?;
        let mut client = ContentClient::new(connection.channel.clone());
        let request = InfoRequest { digest: digest.to_string() };
        let info = client.info(call.headers.with(request));
        let answer = call.answer(self.patience, info).await?.into_inner();
        Ok(answer.info.unwrap_or_default().labels)
    }

    /// Starts to read a blob. The caller must verify the bytes.
    pub(in super::super) async fn read(
        &self,
        digest: &Digest,
        headers: &EngineHeaders,
        wanted: &CancelToken,
    ) -> Result<ContentReader, ContentError> {
        let call = self.call(format!("read blob {digest} from"), headers, wanted);
        let request = ReadContentRequest { digest: digest.to_string(), ..Default::default() };
        let connection = call.connect().await?;
        let mut client = ContentClient::new(connection.channel.clone());
        let read = client.read(call.headers.with(request));
        let answers = call.answer(self.patience, read).await?.into_inner();
        let (give, parts) = mpsc::channel(AHEAD);
        tokio::spawn(async move {
            let _connection = connection;
            if let Err(error) = pass(&call, answers, &give).await {
                // The reader may be gone.
                let _unread = give.send(Err(error)).await;
            }
        });
        Ok(ContentReader { parts, part: Vec::new(), at: 0 })
    }
}

/// Passes on all parts of a blob, while the reader exists.
async fn pass(
    call: &ContentCall,
    mut answers: Streaming<ReadContentResponse>,
    give: &mpsc::Sender<Result<Vec<u8>, ContentError>>,
) -> Result<(), ContentError> {
    let mut next = 0;
    while let Some(part) = call.answer(call.store.patience, bytes(&mut answers)).await? {
        if u64::try_from(part.offset) != Ok(next) {
            let found = part.offset;
            return Err(call.failed(ContentFault::Order { expected: next, found }));
        }
        next += part.data.len() as u64;
        if give.send(Ok(part.data)).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// Returns the next message that contains bytes. Empty messages do not reset the timeout.
async fn bytes(
    answers: &mut Streaming<ReadContentResponse>,
) -> Result<Option<ReadContentResponse>, Status> {
    loop {
        match answers.message().await? {
            Some(part) if part.data.is_empty() => {}
            part => return Ok(part),
        }
    }
}

/// A blob that blocking threads can read.
#[derive(Debug)]
pub(in super::super) struct ContentReader {
    parts: mpsc::Receiver<Result<Vec<u8>, ContentError>>,
    part: Vec<u8>,
    /// Number of bytes of the part that were read.
    at: usize,
}

impl Read for ContentReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.part.len() {
            let Some(part) = self.parts.blocking_recv() else { return Ok(0) };
            (self.part, self.at) = (part.map_err(io::Error::other)?, 0);
        }
        let count = (&self.part[self.at..]).read(buffer)?;
        self.at += count;
        Ok(count)
    }
}
