//! Counters of a snapshotter since it began: calls by outcome and duration, and layers.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tonic::codegen::{BoxFuture, Context, Poll, Service, http};
use tonic::server::NamedService;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Response, Status};

use containerd_api::counts::counts_client::CountsClient;
use containerd_api::counts::counts_server::Counts as CountsService;
use containerd_api::counts::{CallCounts, GetCountsRequest, GetCountsResponse, OutcomeCount};

/// Upper ends of the ranges of call durations, in microseconds. The last range has no end.
pub(super) const CALL_TIMES: [u64; 12] = [
    300,
    1_000,
    3_000,
    10_000,
    30_000,
    100_000,
    300_000,
    1_000_000,
    3_000_000,
    10_000_000,
    30_000_000,
    100_000_000,
];

/// Names of calls that are counted separately. The list is fixed, because a client could invent names.
const CALLS: [&str; 12] = [
    "Apply", "Cleanup", "Commit", "Diff", "List", "Mounts", "Prepare", "Remove", "Stat", "Update",
    "Usage", "View",
];
/// Name of the counter for all other calls.
const OTHERS: &str = "other";

#[derive(Debug, Default)]
pub(super) struct Counts {
    calls: Mutex<BTreeMap<&'static str, Calls>>,
    read_layers: AtomicU64,
    read_bytes: AtomicU64,
    known_layers: AtomicU64,
    skipped_layers: AtomicU64,
    committed_layers: AtomicU64,
    committed_bytes: AtomicU64,
    collections: AtomicU64,
    failed_collections: AtomicU64,
    collected_items: AtomicU64,
    collected_bytes: AtomicU64,
    /// Time of the last collection that ended well, in seconds since 1970.
    last_collection: AtomicU64,
    damaged_snapshots: AtomicU64,
    repaired_layers: AtomicU64,
    failed_repairs: AtomicU64,
}

#[derive(Debug, Default)]
struct Calls {
    outcomes: BTreeMap<&'static str, u64>,
    histogram: [u64; CALL_TIMES.len() + 1],
    micros: u64,
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

impl Counts {
    fn called(&self, path: &str, code: Code, took: Duration) {
        let name = path.rsplit('/').next().unwrap_or_default();
        let name = CALLS.iter().find(|it| **it == name).unwrap_or(&OTHERS);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = calls.entry(name).or_default();
        *calls.outcomes.entry(name_of(code)).or_default() += 1;
        calls.histogram[CALL_TIMES.partition_point(|it| *it < micros)] += 1;
        calls.micros = calls.micros.saturating_add(micros);
    }

    /// Counts a layer that was read from its blob. `bytes` is the size of its tar.
    pub(super) fn read(&self, bytes: u64) {
        add(&self.read_layers, 1);
        add(&self.read_bytes, bytes);
    }

    /// Counts a layer that was known by its blob, and not unpacked.
    pub(super) fn known(&self) {
        add(&self.known_layers, 1);
    }

    /// Counts a layer that was not downloaded.
    pub(super) fn skipped(&self) {
        add(&self.skipped_layers, 1);
    }

    /// Counts a layer that was made of the changes of a root.
    pub(super) fn committed(&self, bytes: u64) {
        add(&self.committed_layers, 1);
        add(&self.committed_bytes, bytes);
    }

    /// Counts a collection with the number and the size in bytes of the removed files, and its end in seconds since
    /// 1970.
    pub(super) fn collected(&self, items: u64, bytes: u64, end: u64) {
        add(&self.collections, 1);
        add(&self.collected_items, items);
        add(&self.collected_bytes, bytes);
        self.last_collection.store(end, Ordering::Relaxed);
    }

    /// Counts a failed collection.
    pub(super) fn not_collected(&self) {
        add(&self.failed_collections, 1);
    }

    /// Counts snapshots whose records are damaged.
    pub(super) fn found_damaged(&self, snapshots: u64) {
        add(&self.damaged_snapshots, snapshots);
    }

    /// Counts an attempt to read a layer with lost data again.
    pub(super) fn repaired(&self, succeeded: bool) {
        add(if succeeded { &self.repaired_layers } else { &self.failed_repairs }, 1);
    }

    pub(super) fn now(&self, instance: &str) -> GetCountsResponse {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = calls.iter().map(|(name, calls)| CallCounts {
            name: (*name).to_owned(),
            outcomes: calls
                .outcomes
                .iter()
                .map(|(code, calls)| OutcomeCount { code: (*code).to_owned(), calls: *calls })
                .collect(),
            histogram: calls.histogram.to_vec(),
            micros: calls.micros,
        });
        GetCountsResponse {
            instance: instance.to_owned(),
            calls: calls.collect(),
            read_layers: of(&self.read_layers),
            read_bytes: of(&self.read_bytes),
            known_layers: of(&self.known_layers),
            skipped_layers: of(&self.skipped_layers),
            committed_layers: of(&self.committed_layers),
            committed_bytes: of(&self.committed_bytes),
            collections: of(&self.collections),
            failed_collections: of(&self.failed_collections),
            collected_items: of(&self.collected_items),
            collected_bytes: of(&self.collected_bytes),
            last_collection: of(&self.last_collection),
            damaged_snapshots: of(&self.damaged_snapshots),
            repaired_layers: of(&self.repaired_layers),
            failed_repairs: of(&self.failed_repairs),
        }
    }
}

/// Returns the name of a status code. Source: gRPC, "Status codes and their use", in the spelling of Go clients.
const fn name_of(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

/// A gRPC service whose calls are counted.
#[derive(Debug, Clone)]
pub(super) struct Counted<S> {
    pub(super) service: S,
    pub(super) counts: Arc<Counts>,
}

impl<S, B> Service<http::Request<B>> for Counted<S>
where
    S: Service<http::Request<B>, Response = http::Response<tonic::body::Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = Infallible;
    type Future = BoxFuture<S::Response, Infallible>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let begun = Instant::now();
        let path = request.uri().path().to_owned();
        let answer = self.service.call(request);
        let counts = Arc::clone(&self.counts);
        Box::pin(async move {
            let answer = answer.await?;
            // A response without a status in its header counts as OK.
            let status = Status::from_header_map(answer.headers());
            let code = status.map_or(Code::Ok, |it| it.code());
            counts.called(&path, code, begun.elapsed());
            Ok(answer)
        })
    }
}

impl<S: NamedService> NamedService for Counted<S> {
    const NAME: &'static str = S::NAME;
}

/// The service that returns the counters.
pub(super) struct Asked {
    pub(super) instance: String,
    pub(super) counts: Arc<Counts>,
}

#[tonic::async_trait]
impl CountsService for Asked {
    async fn get(
        &self,
        _: Request<GetCountsRequest>,
    ) -> Result<Response<GetCountsResponse>, Status> {
        Ok(Response::new(self.counts.now(&self.instance)))
    }
}

/// Returns the counters of the snapshotter at a socket, or `None` if no service listens there.
///
/// # Errors
/// If the request fails.
pub fn ask_counts(socket: &Path) -> io::Result<Option<GetCountsResponse>> {
    match std::os::unix::net::UnixStream::connect(socket) {
        Ok(_) => {}
        Err(error) => {
            return match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Ok(None),
                _ => Err(error),
            };
        }
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()));
        let endpoint = endpoint.map_err(io::Error::other)?.timeout(PATIENCE);
        let channel = endpoint.connect().await.map_err(io::Error::other)?;
        let answer = CountsClient::new(channel).get(GetCountsRequest {}).await;
        let answer = answer.map_err(|status| io::Error::other(status.message().to_owned()))?;
        Ok(Some(answer.into_inner()))
    })
}

/// Timeout of a reply.
const PATIENCE: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_name_outcome_and_time() {
        let counts = Counts::default();
        let took = Duration::from_micros;
        counts.called("/containerd.services.snapshots.v1.Snapshots/Prepare", Code::Ok, took(300));
        counts.called("/any/Prepare", Code::AlreadyExists, took(301));
        counts.called("/any/Prepare", Code::Ok, Duration::MAX);
        counts.called("/any/\u{1b}[2J", Code::Unimplemented, took(0));
        counts.called("", Code::Unimplemented, took(1));
        counts.read(7);
        counts.read(8);
        counts.committed(9);
        counts.collected(2, 3, 1_700_000_000);
        counts.collected(2, 3, 1_700_000_001);
        counts.found_damaged(4);
        counts.repaired(true);
        counts.repaired(false);
        counts.repaired(false);
        let now = counts.now("e");
        let names: Vec<_> = now.calls.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["Prepare", "other"]);
        let outcomes = |index: usize| {
            let all = now.calls[index].outcomes.iter();
            all.map(|it| (it.code.as_str(), it.calls)).collect::<Vec<_>>()
        };
        assert_eq!(outcomes(0), [("AlreadyExists", 1), ("OK", 2)]);
        assert_eq!(outcomes(1), [("Unimplemented", 2)]);
        assert_eq!(now.calls[0].histogram, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!((now.read_layers, now.read_bytes), (2, 15));
        assert_eq!((now.committed_layers, now.committed_bytes, now.known_layers), (1, 9, 0));
        assert_eq!(
            (now.collections, now.collected_items, now.last_collection),
            (2, 4, 1_700_000_001)
        );
        assert_eq!((now.damaged_snapshots, now.repaired_layers, now.failed_repairs), (4, 1, 2));
    }
}
