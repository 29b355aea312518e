//! Looks for indexes at mirrors.

use std::io;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use image::lazy::Head;
use oci::registry::{AskedHosts, Fetched, Registry};
use store::{IndexWindows, OperationError};

use super::artifact::{LAZY_ARTIFACT, LazyParts};
use super::registry::{
    Candidate, LazyFetch, LazyFetchError, begin, begin_listed, blob, ignore, sorted,
};
use super::{LayerIndex, group_windows};

/// How much longer a search waits for the guessed manifest than for the image's manifest.
const GUESS_WAIT: Duration = Duration::from_secs(1);

/// A search for an index at mirrors, in a separate thread, so that a slow mirror delays no pull for which the registry
/// has an index.
#[derive(Debug)]
pub(super) struct MirrorSearch(Receiver<Option<Candidate>>);

impl MirrorSearch {
    /// Begins a search. Returns `None` if there can be no further thread.
    pub(super) fn begin(
        registry: &Registry,
        wanted: &LazyFetch<'_>,
        guessed: Option<Receiver<Option<Fetched>>>,
    ) -> Option<Self> {
        let (sender, receiver) = mpsc::channel();
        let LazyFetch { reference, digest, bytes, manifest, policies, trust } = *wanted;
        let (registry, reference, digest) = (registry.clone(), reference.clone(), *digest);
        let (bytes, manifest, policies) = (bytes.to_vec(), manifest.clone(), policies.clone());
        let search = move || {
            let wanted = LazyFetch {
                reference: &reference,
                digest: &digest,
                bytes: &bytes,
                manifest: &manifest,
                policies: &policies,
                trust,
            };
            let guessed = guessed.and_then(|it| it.recv_timeout(GUESS_WAIT).ok()?);
            // The pull may have ended.
            let _sent = sender.send(find_at_mirrors(&registry, &wanted, guessed));
        };
        thread::Builder::new().spawn(search).is_ok().then_some(Self(receiver))
    }

    /// Waits for the result.
    pub(super) fn result(self) -> Option<Candidate> {
        self.0.recv().ok().flatten()
    }
}

/// Fetches an index that a mirror has: the guessed one, or else the first usable one in a list.
fn find_at_mirrors(
    registry: &Registry,
    wanted: &LazyFetch<'_>,
    guessed: Option<Fetched>,
) -> Option<Candidate> {
    let hosts = AskedHosts::Mirrors;
    let used = |error: LazyFetchError| ignore(&error);
    if let Some(Fetched { digest, .. }) = guessed
        && let Ok(artifact) = begin(registry, wanted, guessed.as_ref()?).map_err(used)
    {
        return Some(Candidate { digest, artifact, hosts });
    }
    let refused = guessed.map(|it| it.digest);
    let listed = registry.referrers_once(hosts, wanted.digest, LAZY_ARTIFACT);
    let listed = sorted(wanted, listed).map_err(used).ok()?;
    listed.into_iter().filter(|it| refused != Some(*it)).find_map(|digest| {
        let artifact = begin_listed(registry, wanted, &digest).map_err(used).ok()?;
        Some(Candidate { digest, artifact, hosts })
    })
}

/// Fetches the windows of all devices, and checks that they can be read.
pub(super) fn with_windows(
    registry: &Registry,
    parts: LazyParts,
) -> Result<LazyParts, OperationError> {
    let mut indexes = Vec::new();
    for LayerIndex { head, windows } in parts.indexes {
        let windows = match windows {
            IndexWindows::Blob(digest) => {
                let object = format!("the windows {digest} of the index");
                let failed = OperationError::of("fetch", &object);
                let bytes = blob(registry, &digest, head.windows_bytes()).map_err(failed)?;
                let is_right = digest.matches(&bytes) && are_windows_of(&head, &bytes);
                let wrong = || io::Error::new(io::ErrorKind::InvalidData, "their bytes are wrong");
                is_right.then_some(bytes).ok_or_else(wrong).map_err(failed)?
            }
            IndexWindows::Groups(bytes) => bytes,
        };
        indexes.push(LayerIndex { head, windows: IndexWindows::Groups(windows) });
    }
    Ok(LazyParts { indexes, ..parts })
}

/// Whether these are groups of windows as the head describes them.
fn are_windows_of(head: &Head, mut bytes: &[u8]) -> bool {
    let ends = head.groups.iter().skip(1).map(|it| it.first as usize);
    let ends = ends.chain(std::iter::once(head.spans.len()));
    let mut groups = head.groups.iter().zip(ends);
    let are_right = groups.all(|(group, end)| {
        let Some((frame, rest)) = bytes.split_at_checked(group.bytes as usize) else {
            return false;
        };
        bytes = rest;
        let spans = end.checked_sub(group.first as usize);
        spans.is_some_and(|spans| group_windows(frame, spans).is_some())
    });
    are_right && bytes.is_empty()
}
