//! Writes blobs to an engine's content store.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prost_types::FieldMask;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};
use transfer::export::PackedLayer;

use super::call::{AHEAD, ContentCall, ContentError, ContentFault, ContentStore, EngineHeaders};
use super::connection::Connection;
use crate::snapshots::cancellation::{Caller, CancelToken};
use containerd_api::content::content_client::ContentClient;
use containerd_api::content::{
    AbortRequest, Info, InfoRequest, UpdateRequest, WriteAction, WriteContentRequest,
    WriteContentResponse,
};

/// The label with the digest of a layer's tar. Source: containerd's package `labels`.
const UNCOMPRESSED: &str = "containerd.io/uncompressed";
/// Largest number of bytes in a message, as in containerd itself.
const PART: usize = 1 << 20;

/// The engine's description of new content.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct NewContent {
    /// Name until the content is complete. If it is empty, a name is generated.
    pub(in super::super) reference: String,
    pub(in super::super) labels: HashMap<String, String>,
}

/// A request of a writer.
#[derive(Debug)]
enum Step {
    Part(Vec<u8>),
    /// Discard all bytes so far.
    Again,
    /// Complete the blob, which is this layer.
    Commit(PackedLayer),
}

/// Writes a blob from a blocking thread. Without a commit, the engine never sees the blob.
#[derive(Debug)]
pub(in super::super) struct ContentWriter {
    call: ContentCall,
    steps: mpsc::Sender<Step>,
    /// `None` after the outcome was received.
    outcome: Option<oneshot::Receiver<Result<(), ContentError>>>,
    part: Vec<u8>,
}

impl ContentStore {
    /// Starts to write a blob.
    pub(in super::super) async fn write(
        &self,
        content: NewContent,
        headers: &EngineHeaders,
        wanted: &CancelToken,
    ) -> Result<ContentWriter, ContentError> {
        let is_ours = content.reference.is_empty();
        let reference = if is_ours { unused_reference() } else { content.reference };
        let call = self.call(format!("write {reference:?} to"), headers, wanted);
        let mut sending = Sending::begin(call.clone(), reference, content.labels).await?;
        let (steps, take) = mpsc::channel(1);
        let (tell, outcome) = oneshot::channel();
        tokio::spawn(async move {
            let outcome = sending.follow(take).await;
            let Sending { call, reference, connection, .. } = sending;
            // Closing the connection releases the engine's lock on the name.
            drop(connection);
            let is_left = is_ours && outcome.is_err();
            // The writer may be gone.
            let _unheard = tell.send(outcome);
            if is_left && let Err(error) = abort(call, reference).await {
                // The engine removes the unfinished blob after a day.
                let error: &dyn std::error::Error = &error;
                tracing::debug!(error, "cannot remove an unfinished blob");
            }
        });
        Ok(ContentWriter { call, steps, outcome: Some(outcome), part: Vec::new() })
    }
}

/// Returns a name that no other call uses.
fn unused_reference() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("quire-diff-{}-{number}", std::process::id())
}

impl ContentWriter {
    /// Discards all bytes so far.
    pub(in super::super) fn again(&mut self) -> Result<(), ContentError> {
        self.part.clear();
        self.step(Step::Again)
    }

    /// Completes the blob, which has this digest. When this returns, the engine has stored it durably.
    pub(in super::super) fn commit(mut self, packed: &PackedLayer) -> Result<(), ContentError> {
        self.send()?;
        self.step(Step::Commit(packed.clone()))?;
        self.outcome()
    }

    fn send(&mut self) -> Result<(), ContentError> {
        let part = std::mem::take(&mut self.part);
        if part.is_empty() { Ok(()) } else { self.step(Step::Part(part)) }
    }

    fn step(&mut self, step: Step) -> Result<(), ContentError> {
        match self.steps.blocking_send(step) {
            Ok(()) => Ok(()),
            Err(_ended) => self.outcome(),
        }
    }

    /// Waits for the outcome of the call.
    fn outcome(&mut self) -> Result<(), ContentError> {
        // Without an outcome, the service is ending.
        let outcome = self.outcome.take().and_then(|it| it.blocking_recv().ok());
        outcome.unwrap_or_else(|| Err(self.call.failed(ContentFault::Unwanted)))
    }
}

impl Write for ContentWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.part.len() == PART {
            self.send().map_err(io::Error::other)?;
        }
        if self.part.is_empty() {
            self.part.reserve_exact(PART);
        }
        let count = bytes.len().min(PART - self.part.len());
        self.part.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A blob that is being sent.
#[derive(Debug)]
struct Sending {
    call: ContentCall,
    connection: Connection,
    reference: String,
    labels: HashMap<String, String>,
    requests: mpsc::Sender<WriteContentRequest>,
    answers: Streaming<WriteContentResponse>,
    /// Number of bytes that were sent.
    sent: u64,
    /// For each message without a reply, the number of bytes that were sent up to its end.
    unanswered: VecDeque<u64>,
}

impl Sending {
    async fn begin(
        call: ContentCall,
        reference: String,
        labels: HashMap<String, String>,
    ) -> Result<Self, ContentError> {
        let connection = call.connect().await?;
        let mut client = ContentClient::new(connection.channel.clone());
        let (requests, take) = mpsc::channel(AHEAD);
        let first = WriteContentRequest { r#ref: reference.clone(), ..Default::default() };
        // Servers reply only after the first message.
        requests.try_send(first).expect("the channel is new");
        let write = client.write(call.headers.with(ReceiverStream::new(take)));
        let patience = call.store.patience;
        let answers = call.answer(patience, write).await?.into_inner();
        let unanswered = VecDeque::new();
        let mut it =
            Self { call, connection, reference, labels, requests, answers, sent: 0, unanswered };
        // The engine discards the data of an earlier attempt when it receives the first bytes.
        it.next(patience).await?;
        Ok(it)
    }

    /// Carries out the requests of the writer.
    async fn follow(&mut self, mut steps: mpsc::Receiver<Step>) -> Result<(), ContentError> {
        let mut wanted = self.call.wanted.clone();
        loop {
            let step = tokio::select! {
                step = steps.recv() => step,
                () = wanted.gone() => None,
            };
            match step {
                Some(Step::Part(part)) => self.send(WriteAction::Write, part).await?,
                Some(Step::Again) => {
                    self.catch_up(0).await?;
                    self.sent = 0;
                }
                Some(Step::Commit(packed)) => return self.commit(&packed).await,
                None => return Err(self.call.failed(ContentFault::Unwanted)),
            }
        }
    }

    /// Sends a message. A write at offset 0 replaces all data.
    async fn send(&mut self, action: WriteAction, data: Vec<u8>) -> Result<(), ContentError> {
        self.catch_up(AHEAD - 1).await?;
        let mut request = WriteContentRequest {
            action: action.into(),
            offset: number(self.sent),
            ..Default::default()
        };
        self.sent += data.len() as u64;
        if action == WriteAction::Commit {
            request.total = number(self.sent);
            request.labels = std::mem::take(&mut self.labels);
        }
        request.data = data;
        let sent = self.call.within(self.call.store.patience, self.requests.send(request)).await?;
        if sent.is_err() {
            // The next reply contains the reason.
            self.next(self.call.store.patience).await?;
            return Err(self.call.failed(ContentFault::Ended));
        }
        self.unanswered.push_back(self.sent);
        Ok(())
    }

    /// Waits until at most `count` messages have no reply.
    async fn catch_up(&mut self, count: usize) -> Result<(), ContentError> {
        while self.unanswered.len() > count {
            let answer = self.next(self.call.store.patience).await?;
            let sent = self.unanswered.pop_front().unwrap_or_default();
            self.check(sent, &answer)?;
        }
        Ok(())
    }

    async fn next(&mut self, patience: Duration) -> Result<WriteContentResponse, ContentError> {
        let answer = self.call.answer(patience, self.answers.message()).await?;
        answer.ok_or_else(|| self.call.failed(ContentFault::Ended))
    }

    fn check(&self, sent: u64, answer: &WriteContentResponse) -> Result<(), ContentError> {
        let taken = answer.offset;
        if u64::try_from(taken) == Ok(sent) {
            return Ok(());
        }
        Err(self.call.failed(ContentFault::Taken { sent, taken }))
    }

    async fn commit(&mut self, packed: &PackedLayer) -> Result<(), ContentError> {
        let diff_id = packed.diff_id.to_string();
        self.labels.insert(UNCOMPRESSED.to_owned(), diff_id.clone());
        self.catch_up(0).await?;
        // The commit does not state the expected digest: if it did and the blob existed, the engine would not add the
        // blob to the lease.
        self.send(WriteAction::Commit, Vec::new()).await?;
        // The engine syncs all data to a disk, which may be slow.
        let patience = self.call.store.patience + Duration::from_secs(self.sent >> 20);
        let answer = match self.call.within(patience, self.answers.message()).await? {
            Ok(Some(answer)) => answer,
            Ok(None) => return Err(self.call.failed(ContentFault::Ended)),
            Err(status) if status.code() == Code::AlreadyExists => {
                return self.check_existing(packed, diff_id).await;
            }
            Err(status) => return Err(self.call.refused(&status)),
        };
        self.check(packed.size, &answer)?;
        if answer.digest != packed.digest.to_string() {
            let (sent, named) = (Box::new(packed.digest), answer.digest);
            return Err(self.call.failed(ContentFault::Digest { sent, named }));
        }
        Ok(())
    }

    /// Checks a blob that existed before this write, and adds the missing label.
    async fn check_existing(
        &mut self,
        packed: &PackedLayer,
        diff_id: String,
    ) -> Result<(), ContentError> {
        let patience = self.call.store.patience;
        let digest = packed.digest.to_string();
        let mut client = ContentClient::new(self.connection.channel.clone());
        let request = self.call.headers.with(InfoRequest { digest: digest.clone() });
        let answer = self.call.answer(patience, client.info(request)).await?;
        let found = answer.into_inner().info.unwrap_or_default();
        if found.digest != digest {
            let (sent, named) = (Box::new(packed.digest), found.digest);
            return Err(self.call.failed(ContentFault::Digest { sent, named }));
        }
        if u64::try_from(found.size) != Ok(packed.size) {
            let fault = ContentFault::Taken { sent: packed.size, taken: found.size };
            return Err(self.call.failed(fault));
        }
        if found.labels.contains_key(UNCOMPRESSED) {
            return Ok(());
        }
        let labels = HashMap::from([(UNCOMPRESSED.to_owned(), diff_id)]);
        let update = UpdateRequest {
            info: Some(Info { digest, labels, ..Info::default() }),
            update_mask: Some(FieldMask { paths: vec![format!("labels.{UNCOMPRESSED}")] }),
        };
        let request = self.call.headers.with(update);
        self.call.answer(patience, client.update(request)).await?;
        Ok(())
    }
}

/// Removes an unfinished blob, even if the engine's call was dropped.
async fn abort(call: ContentCall, reference: String) -> Result<(), ContentError> {
    let (_caller, wanted) = Caller::new();
    let call = ContentCall { wanted, ..call };
    let request = call.headers.with(AbortRequest { r#ref: reference });
    let connection = call.connect().await?;
    let mut client = ContentClient::new(connection.channel.clone());
    call.answer(call.store.patience, client.abort(request)).await?;
    Ok(())
}

fn number(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
