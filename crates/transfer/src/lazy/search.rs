//! Looks for the best index of an image, at its registry and at mirrors.

use std::collections::VecDeque;
use std::sync::mpsc::Receiver;

use image::digest::Digest;
use oci::manifest::{Config, Descriptor};
use oci::registry::{AskedHosts, Fetched, Registry};
use store::OperationError;

use super::artifact::{LAZY_ARTIFACT, LazySubject};
use super::mirrors::{MirrorSearch, with_windows};
use super::registry::{
    Candidate, FetchedIndex, LazyFetch, LazyFetchError, begin, begin_listed, ignore, sorted,
};
use crate::chunked::Toc;

/// The manifests under the [tag of an index](super::index_tag). They may belong to another image.
#[derive(Debug, Default)]
pub struct GuessedIndexes {
    /// The registry's, if it has responded.
    pub own: Option<Fetched>,
    /// Receives that of the first mirror that has one.
    pub of_mirrors: Option<Receiver<Option<Fetched>>>,
}

/// Looks for an index of an image, the best one first. An index that the registry lists precedes those of mirrors,
/// because a mirror may have made its own, without a hot pack.
#[derive(Debug, Default)]
pub struct IndexSearch {
    guessed: GuessedIndexes,
    /// Digests of the artifacts' manifests that the registry lists and that were not tried yet, the best one first.
    /// `None` before the list is requested.
    listed: Option<VecDeque<Digest>>,
    /// The best index, if it was fetched.
    best: Option<Candidate>,
    /// The search at mirrors. Its result is used, and awaited, only if the registry has no index that can be used.
    at_mirrors: Option<MirrorSearch>,
    /// Whether the registry's list is requested again if mirrors have no index: the only request failed.
    is_list_due: bool,
    /// Digest of the guessed manifest, if the index is not trusted.
    refused: Option<Digest>,
    /// The first error.
    error: Option<LazyFetchError>,
}

impl IndexSearch {
    /// Begins a search.
    #[must_use]
    pub fn new(guessed: GuessedIndexes) -> Self {
        Self { guessed, ..Self::default() }
    }

    /// Fetches the best index as far as possible without the image's config.
    pub fn find(&mut self, registry: &Registry, wanted: &LazyFetch<'_>) {
        if let Some(guessed) = self.guessed.own.take() {
            match begin(registry, wanted, &guessed) {
                Ok(artifact) => {
                    let (digest, hosts) = (guessed.digest, AskedHosts::Own);
                    self.best = Some(Candidate { digest, artifact, hosts });
                    return;
                }
                Err(error @ LazyFetchError::Untrusted { .. }) => {
                    self.refused = Some(guessed.digest);
                    self.failed(error);
                }
                // If the list contains the same index, its error is reported then.
                Err(error) => ignore(&error),
            }
        }
        if self.listed.is_none() {
            self.list(registry, wanted);
        }
        self.best = self.next_listed(registry, wanted);
        if self.best.is_none() {
            self.best = self.at_mirrors.take().and_then(MirrorSearch::result);
        }
        if self.best.is_none() && std::mem::take(&mut self.is_list_due) {
            let hosts = AskedHosts::Own;
            let again = registry.referrers_at(hosts, wanted.digest, LAZY_ARTIFACT);
            self.listed = Some(self.or_none(sorted(wanted, again)));
            self.best = self.next_listed(registry, wanted);
        }
    }

    /// Starts the search at mirrors, and requests the registry's list at the same time.
    fn list(&mut self, registry: &Registry, wanted: &LazyFetch<'_>) {
        self.at_mirrors = match registry.has_resolving_mirrors() {
            true => MirrorSearch::begin(registry, wanted, self.guessed.of_mirrors.take()),
            false => None,
        };
        let own = AskedHosts::Own;
        self.listed = Some(if self.at_mirrors.is_some() {
            // A registry that is busy does not delay a pull for which a mirror has an index.
            let listed = registry.referrers_once(own, wanted.digest, LAZY_ARTIFACT);
            self.is_list_due = listed.is_err();
            sorted(wanted, listed).unwrap_or_default()
        } else {
            let listed = registry.referrers_at(own, wanted.digest, LAZY_ARTIFACT);
            self.or_none(sorted(wanted, listed))
        });
    }

    fn or_none(&mut self, listed: Result<VecDeque<Digest>, LazyFetchError>) -> VecDeque<Digest> {
        listed.unwrap_or_else(|error| {
            self.error.get_or_insert(error);
            VecDeque::new()
        })
    }

    /// Fetches the next index that the registry lists and that can be used.
    fn next_listed(&mut self, registry: &Registry, wanted: &LazyFetch<'_>) -> Option<Candidate> {
        while let Some(digest) = self.listed.as_mut().and_then(VecDeque::pop_front) {
            if self.refused == Some(digest) {
                continue;
            }
            match begin_listed(registry, wanted, &digest) {
                Ok(artifact) => {
                    return Some(Candidate { digest, artifact, hosts: AskedHosts::Own });
                }
                Err(error) => self.failed(error),
            }
        }
        None
    }

    fn failed(&mut self, error: LazyFetchError) {
        ignore(&error);
        self.error.get_or_insert(error);
    }

    /// Returns the best index that matches the image with this config, whose manifest is that of `wanted`. An index of a
    /// mirror has its windows, because the mirror may be gone when they are needed.
    ///
    /// # Errors
    /// [`LazyFetchError`] of the first index of the registry, if none can be used.
    pub fn fetch(
        mut self,
        registry: &Registry,
        wanted: &LazyFetch<'_>,
        config: &Config,
    ) -> Result<FetchedIndex, LazyFetchError> {
        let LazyFetch { reference, digest, bytes, manifest, .. } = wanted;
        let subject = LazySubject { digest, bytes, manifest, config };
        loop {
            if self.best.is_none() {
                self.find(registry, wanted);
            }
            let Some(Candidate { digest: artifact, artifact: fetched, hosts }) = self.best.take()
            else {
                break;
            };
            let object = format_args!("index {artifact} of {reference}");
            let parts = fetched.open(&subject).map_err(OperationError::of("use", object));
            match hosts {
                AskedHosts::Own => match parts {
                    Ok(parts) => return Ok(FetchedIndex { artifact, parts }),
                    Err(error) => self.failed(error.into()),
                },
                // Without this mirror, the error would be that of the registry.
                AskedHosts::Mirrors => match parts.and_then(|it| with_windows(registry, it)) {
                    Ok(parts) => return Ok(FetchedIndex { artifact, parts }),
                    Err(error) => ignore(&error.into()),
                },
            }
        }
        let reference = Box::new((*reference).clone());
        // OCI's media types and Docker's end alike. Most zstd layers without a table of contents are one frame.
        let may_have_index =
            |it: &Descriptor| it.media_type.ends_with("gzip") || Toc::is_announced(it);
        let none = || match manifest.layers.iter().all(may_have_index) {
            true => LazyFetchError::None(reference),
            false => LazyFetchError::NotCompressed(reference),
        };
        Err(self.error.unwrap_or_else(none))
    }
}
