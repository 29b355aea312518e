//! A fake content store of an engine: it keeps blobs, lies, or does not respond.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use containerd_api::content::content_server::{Content, ContentServer};
use containerd_api::content::{
    AbortRequest, Info, InfoRequest, InfoResponse, ReadContentRequest, ReadContentResponse,
    UpdateRequest, UpdateResponse, WriteAction, WriteContentRequest, WriteContentResponse,
};
use containerd_api::leases::leases_server::{Leases, LeasesServer};
use containerd_api::leases::{CreateRequest, CreateResponse, Lease};
use image::digest::Digest;
use tokio::net::UnixListener;
use tokio::sync::{Notify, mpsc};
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::metadata::MetadataMap;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::Stage;

/// A fault of the content store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Lie {
    #[default]
    None,
    /// Blobs lack their last byte.
    Short,
    /// Blobs have one additional byte.
    Long,
    /// One byte of each blob is wrong.
    Wrong,
    /// Parts have wrong offsets.
    Order,
    /// Empty messages are sent without end.
    Empty,
    /// Reads and writes stop after the first part of a blob.
    Stuck,
    /// All calls stay without a reply.
    Silent,
    /// Replies claim fewer bytes than were sent.
    Taken,
    /// Writes end early.
    Ended,
    /// The reply to a commit has another digest.
    Digest,
    /// Each committed blob already exists, with another length.
    Length,
    /// Each commit is refused.
    Refusal,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Blob {
    pub(crate) bytes: Vec<u8>,
    pub(crate) labels: BTreeMap<String, String>,
}

type Hook = Box<dyn Fn() + Send>;

#[derive(Default)]
pub(crate) struct Kept {
    pub(crate) blobs: BTreeMap<String, Blob>,
    pub(crate) lie: Lie,
    /// Headers of the last call.
    pub(crate) headers: MetadataMap,
    /// Blobs that were begun and not committed.
    pub(crate) begun: BTreeMap<String, Vec<u8>>,
    /// Labels of leases, by id.
    pub(crate) leases: BTreeMap<String, HashMap<String, String>>,
    /// Called at the first part of each blob.
    pub(crate) hook: Option<Hook>,
}

/// A running content store.
pub(crate) struct FakeStore {
    pub(crate) kept: Arc<Mutex<Kept>>,
    /// Number of reads and writes that clients have not ended.
    pub(crate) open: Arc<AtomicUsize>,
    stop: Arc<Notify>,
    server: Option<JoinHandle<()>>,
}

impl FakeStore {
    /// Starts a content store at the socket of the stage's engine.
    pub(crate) fn start(stage: &Stage) -> Self {
        let mut it =
            Self { kept: Arc::default(), open: Arc::default(), stop: Arc::default(), server: None };
        let listener = std::os::unix::net::UnixListener::bind(stage.engine()).unwrap();
        listener.set_nonblocking(true).unwrap();
        let service = Service { kept: Arc::clone(&it.kept), open: Arc::clone(&it.open) };
        let stop = Arc::clone(&it.stop);
        it.server = Some(thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = UnixListener::from_std(listener).unwrap();
                let leases = LeasesServer::new(service.clone());
                let server = Server::builder()
                    .add_service(ContentServer::new(service))
                    .add_service(leases);
                tokio::select! {
                    served = server.serve_with_incoming(UnixListenerStream::new(listener)) => served.unwrap(),
                    () = stop.notified() => {}
                }
            });
        }));
        it
    }

    pub(crate) fn lie(&self, lie: Lie) {
        self.kept.lock().unwrap().lie = lie;
    }

    pub(crate) fn add(&self, bytes: &[u8]) -> Digest {
        let digest = Digest::sha256(bytes);
        let blob = Blob { bytes: bytes.to_vec(), labels: BTreeMap::new() };
        self.kept.lock().unwrap().blobs.insert(digest.to_string(), blob);
        digest
    }

    pub(crate) fn blob(&self, digest: &str) -> Blob {
        self.kept.lock().unwrap().blobs[digest].clone()
    }
}

impl Drop for FakeStore {
    fn drop(&mut self) {
        self.stop.notify_one();
        let ended = self.server.take().unwrap().join();
        if !thread::panicking() {
            ended.unwrap();
        }
    }
}

#[derive(Clone)]
struct Service {
    kept: Arc<Mutex<Kept>>,
    open: Arc<AtomicUsize>,
}

/// A call that a client has not ended.
struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Service {
    async fn begin(&self, headers: &MetadataMap) -> Lie {
        let lie = {
            let mut kept = self.kept.lock().unwrap();
            kept.headers = headers.clone();
            kept.lie
        };
        if lie == Lie::Silent {
            let _open = self.open();
            std::future::pending::<()>().await;
        }
        lie
    }

    fn open(&self) -> Open {
        self.open.fetch_add(1, Ordering::SeqCst);
        Open(Arc::clone(&self.open))
    }

    fn info(&self, digest: &str) -> Result<Info, Status> {
        let kept = self.kept.lock().unwrap();
        let blob = kept.blobs.get(digest).ok_or_else(|| Status::not_found(digest))?;
        let more = i64::from(kept.lie == Lie::Length);
        let size = i64::try_from(blob.bytes.len()).unwrap() + more;
        let labels = blob.labels.clone().into_iter().collect();
        Ok(Info { digest: digest.to_owned(), size, labels })
    }

    /// Handles a message of a write.
    fn take(
        &self,
        reference: &str,
        message: WriteContentRequest,
    ) -> Result<Option<WriteContentResponse>, Status> {
        let mut kept = self.kept.lock().unwrap();
        let lie = kept.lie;
        let action = message.action();
        let is_first = action == WriteAction::Write && message.offset == 0;
        if is_first && let Some(hook) = &kept.hook {
            hook();
        }
        if action == WriteAction::Stat {
            kept.begun.entry(reference.to_owned()).or_default();
        }
        // As in containerd, a removed upload is not started again by a later write.
        let bytes = kept.begun.get_mut(reference).ok_or_else(|| Status::aborted("removed"))?;
        if action != WriteAction::Stat {
            let offset = usize::try_from(message.offset).unwrap();
            if offset == 0 {
                bytes.clear();
            }
            if offset != bytes.len() {
                return Err(Status::out_of_range("not where the last one has ended"));
            }
            bytes.extend_from_slice(&message.data);
        }
        let length = i64::try_from(bytes.len()).unwrap();
        let mut answer = WriteContentResponse { offset: length, ..Default::default() };
        answer.set_action(action);
        if action == WriteAction::Commit {
            assert_eq!(message.total, length);
            let bytes = kept.begun.remove(reference).unwrap();
            let digest = Digest::sha256(&bytes).to_string();
            if kept.blobs.contains_key(&digest) || lie == Lie::Length {
                kept.blobs.entry(digest).or_insert(Blob { bytes, labels: BTreeMap::new() });
                return Err(Status::already_exists("it is there"));
            }
            if lie == Lie::Refusal {
                return Err(Status::failed_precondition("not today"));
            }
            let labels = message.labels.into_iter().collect();
            kept.blobs.insert(digest.clone(), Blob { bytes, labels });
            answer.digest = match lie {
                Lie::Digest => Digest::sha256(b"something else").to_string(),
                _ => digest,
            };
        } else if action == WriteAction::Write && lie == Lie::Taken {
            answer.offset -= 1;
        }
        let is_ended = lie == Lie::Ended && action == WriteAction::Write;
        Ok(Some(answer).filter(|_| !is_ended))
    }
}

#[tonic::async_trait]
impl Leases for Service {
    async fn create(
        &self,
        request: Request<CreateRequest>,
    ) -> Result<Response<CreateResponse>, Status> {
        self.begin(request.metadata()).await;
        let mut kept = self.kept.lock().unwrap();
        let id = format!("lease-{}", kept.leases.len());
        kept.leases.insert(id.clone(), request.into_inner().labels);
        Ok(Response::new(CreateResponse { lease: Some(Lease { id }) }))
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Content for Service {
    async fn info(&self, request: Request<InfoRequest>) -> Result<Response<InfoResponse>, Status> {
        self.begin(request.metadata()).await;
        let info = Some(self.info(&request.into_inner().digest)?);
        Ok(Response::new(InfoResponse { info }))
    }

    async fn update(
        &self,
        request: Request<UpdateRequest>,
    ) -> Result<Response<UpdateResponse>, Status> {
        self.begin(request.metadata()).await;
        let UpdateRequest { info, update_mask } = request.into_inner();
        let info = info.unwrap();
        {
            let mut kept = self.kept.lock().unwrap();
            let blob = kept.blobs.get_mut(&info.digest).unwrap();
            for path in update_mask.unwrap().paths {
                let label = path.strip_prefix("labels.").unwrap();
                blob.labels.insert(label.to_owned(), info.labels[label].clone());
            }
        }
        let info = Some(self.info(&info.digest)?);
        Ok(Response::new(UpdateResponse { info }))
    }

    type ReadStream = Answers<ReadContentResponse>;

    async fn read(
        &self,
        request: Request<ReadContentRequest>,
    ) -> Result<Response<Self::ReadStream>, Status> {
        let lie = self.begin(request.metadata()).await;
        let digest = request.into_inner().digest;
        let mut bytes = {
            let kept = self.kept.lock().unwrap();
            kept.blobs.get(&digest).ok_or_else(|| Status::not_found("no such blob"))?.bytes.clone()
        };
        match lie {
            Lie::Short => drop(bytes.pop()),
            Lie::Long => bytes.push(0),
            Lie::Wrong => bytes[600] ^= 1,
            _ => {}
        }
        let open = self.open();
        let (give, take) = mpsc::channel(1);
        tokio::spawn(async move {
            let _open = open;
            let part = |offset: usize, data: &[u8]| {
                let offset = i64::try_from(offset).unwrap();
                Ok(ReadContentResponse { offset, data: data.to_vec() })
            };
            let parts: Vec<_> = bytes.chunks(4096).enumerate().collect();
            let shift = usize::from(lie == Lie::Order);
            for (at, bytes) in parts {
                // An error means that the reader has closed the call.
                if give.send(part((at + shift) * 4096, bytes)).await.is_err() {
                    return;
                }
                if lie == Lie::Empty {
                    while give.send(part((at + 1) * 4096, &[])).await.is_ok() {
                        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                    }
                    return;
                }
                if lie == Lie::Stuck {
                    give.closed().await;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(take))))
    }

    type WriteStream = Answers<WriteContentResponse>;

    async fn write(
        &self,
        request: Request<Streaming<WriteContentRequest>>,
    ) -> Result<Response<Self::WriteStream>, Status> {
        self.begin(request.metadata()).await;
        let mut messages = request.into_inner();
        let service = self.clone();
        let open = self.open();
        let (give, take) = mpsc::channel(1);
        tokio::spawn(async move {
            let _open = open;
            let mut reference = String::new();
            while let Ok(Some(message)) = messages.message().await {
                if reference.is_empty() {
                    reference.clone_from(&message.r#ref);
                }
                let is_stuck = service.kept.lock().unwrap().lie == Lie::Stuck;
                if is_stuck && message.action() != WriteAction::Stat {
                    give.closed().await;
                }
                match service.take(&reference, message).transpose() {
                    None => return,
                    Some(answer) => {
                        let is_last = answer.is_err();
                        if give.send(answer).await.is_err() || is_last {
                            return;
                        }
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(take))))
    }

    async fn abort(&self, request: Request<AbortRequest>) -> Result<Response<()>, Status> {
        let reference = request.into_inner().r#ref;
        self.kept.lock().unwrap().begun.remove(&reference);
        Ok(Response::new(()))
    }
}

/// Returns labels as in a request.
pub(crate) fn labels(all: &[(&str, &str)]) -> HashMap<String, String> {
    all.iter().map(|it| (it.0.to_owned(), it.1.to_owned())).collect()
}
