//! Evidence of an image's origin and signatures. The store keeps it for policies to decide on each use.

use image::digest::Digest;
use oci::policy::{
    Evidence, ImageOrigin, LocalUse, Policies, Refusal, Repository, SignedItem, Subject, Verdict,
};
use store::{DiskError, OriginError, Resolved, Store};

/// An error reading or storing evidence.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvidenceError {
    #[error("the stored signatures of {item} are damaged: {}", repair(item))]
    Damaged { item: Box<SignedItem>, source: serde_json::Error },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// Why an image in the store may not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UseError {
    /// The policies refuse the image.
    #[error(transparent)]
    Refused(#[from] Box<Refusal>),
    #[error(transparent)]
    Evidence(#[from] EvidenceError),
    #[error(transparent)]
    Origin(#[from] OriginError),
}

/// Returns how to replace damaged signatures.
fn repair(item: &SignedItem) -> &'static str {
    match item {
        SignedItem::Manifest(_) => "pull the image again, or sign it again",
        SignedItem::Image(_) => "sign the image again",
    }
}

/// Returns the evidence in the store for a manifest or an image, which is empty if the manifest was never pulled and
/// the item never signed here.
pub fn read_evidence(
    store: &Store,
    item: impl Into<SignedItem>,
) -> Result<Evidence, EvidenceError> {
    let item = item.into();
    let bytes = match &item {
        SignedItem::Manifest(manifest) => store.downloads.signatures(manifest)?,
        SignedItem::Image(image) => store.downloads.image_signatures(image)?,
    };
    let Some(bytes) = bytes else { return Ok(Evidence::default()) };
    Evidence::decode(&bytes)
        .map_err(|source| EvidenceError::Damaged { item: Box::new(item), source })
}

/// Adds evidence to earlier evidence in the store, so that signatures from one registry are kept if another registry
/// has none. The manifest or image must be in the store with a name, or pinned. Processes that add evidence at the
/// same time wait for each other, so that none is lost.
pub fn keep(
    evidence: &Evidence,
    store: &Store,
    item: impl Into<SignedItem>,
) -> Result<(), EvidenceError> {
    let item = item.into();
    let _alone = store.downloads.lock_signatures()?;
    let before = match read_evidence(store, item) {
        Err(EvidenceError::Damaged { source, .. }) => {
            tracing::warn!(%item, error = %source, "replacing damaged signatures");
            None
        }
        other => Some(other?),
    };
    let mut all = evidence.clone();
    all.add(before.as_ref().unwrap_or(&Evidence::default()));
    if before.as_ref() == Some(&all) {
        return Ok(());
    }
    let bytes = all.encode();
    match &item {
        SignedItem::Manifest(manifest) => store.downloads.set_signatures(manifest, &bytes)?,
        SignedItem::Image(image) => store.downloads.set_image_signatures(image, &bytes)?,
    }
    Ok(())
}

/// Checks whether the policies allow an image of the store to be used. The recorded origins of the image count, not
/// its name. One accepted origin of several is enough, because all of them supplied the same bytes. If a manifest is
/// given, only origins of this manifest count, because it determines which program runs.
pub fn check_use(
    policies: &Policies,
    store: &Store,
    found: &Resolved,
) -> Result<Verdict, UseError> {
    if policies.is_empty() {
        return Ok(Verdict::default());
    }
    let name = found.name.as_ref().map_or_else(|| found.image.to_string(), ToString::to_string);
    let mut refusal = None;
    for (source, manifest) in sources(store, found)? {
        let mut evidence = match manifest {
            Some(manifest) => read_evidence(store, &manifest)?,
            None => Evidence::default(),
        };
        let mut local = None;
        if source == ImageOrigin::Local {
            let of_image = read_evidence(store, &found.image)?;
            evidence.own.extend(of_image.own);
            evidence.signatures.extend(of_image.signatures);
            local = Some(LocalUse { image: found.image, uses_manifest: found.manifest.is_some() });
        }
        let subject = Subject { name: name.clone(), source, manifest, local };
        match policies.decide(&subject, &evidence) {
            Ok(verdict) => return Ok(verdict),
            Err(refused) => refusal = refusal.or(Some(refused)),
        }
    }
    refusal.map_or_else(|| Ok(Verdict::default()), |it| Err(it.into()))
}

/// Checks whether the policies allow the files of an image to be used with the settings of an unknown manifest, as engines
/// do. A recorded origin or a signature would say nothing about these settings, so the origin counts as unknown.
pub fn check_use_by_engine(policies: &Policies, found: &Resolved) -> Result<Verdict, UseError> {
    let (name, source) = (found.image.to_string(), ImageOrigin::Unknown);
    let subject = Subject { name, source, manifest: None, local: None };
    Ok(policies.decide(&subject, &Evidence::default())?)
}

/// Returns each origin of an image with its manifest, and at least one element.
fn sources(
    store: &Store,
    found: &Resolved,
) -> Result<Vec<(ImageOrigin, Option<Digest>)>, UseError> {
    let mut sources = Vec::new();
    let mut add = |source: ImageOrigin, manifest: Option<Digest>| {
        if !sources.contains(&(source.clone(), manifest)) {
            sources.push((source, manifest));
        }
    };
    for origin in store.downloads.origins(&found.image)? {
        if found.manifest.is_some() && origin.manifest != found.manifest {
            continue;
        }
        match &origin.repository {
            None => add(ImageOrigin::Local, origin.manifest),
            // Origins that cannot be parsed are ignored.
            Some(name) => {
                if let Some(name) = Repository::from_name(name) {
                    add(ImageOrigin::Repository(name), origin.manifest);
                }
            }
        }
    }
    // Early versions recorded origins in the evidence of the manifest, and only for pulls.
    if let Some(manifest) = &found.manifest {
        for name in read_evidence(store, manifest)?.origins {
            add(ImageOrigin::Repository(name), Some(*manifest));
        }
    }
    if sources.is_empty() {
        sources.push((ImageOrigin::Unknown, found.manifest));
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use store::{OpenOptions, Who};

    use super::*;

    #[test]
    fn evidence_that_is_added_at_the_same_time_is_all_kept() {
        let folder = tempfile::tempdir().unwrap();
        let open =
            || Store::open(folder.path(), Who::this_process(), OpenOptions::create()).unwrap();
        open();
        let name = |number: usize| Repository::from_name(&format!("ghcr.io/a{number}")).unwrap();
        for turn in 0..5 {
            let manifest = Digest::sha256(&[turn]);
            let start = Barrier::new(8);
            std::thread::scope(|scope| {
                for number in 0..8 {
                    let (start, manifest) = (&start, &manifest);
                    scope.spawn(move || {
                        // As separate processes, each opens the store.
                        let store = open();
                        let evidence =
                            Evidence { origins: vec![name(number)], ..Evidence::default() };
                        start.wait();
                        keep(&evidence, &store, manifest).unwrap();
                    });
                }
            });
            let kept = read_evidence(&open(), &manifest).unwrap().origins;
            for number in 0..8 {
                assert!(kept.contains(&name(number)), "{number}: {kept:?}");
            }
        }
    }
}
