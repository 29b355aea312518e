//! Finds what an earlier version of an image read at its start (decision 36).

use std::cmp::Reverse;

use image::digest::Digest;
use image::verity::ImageId;
use store::{
    DEFAULT_TRACE, OperationError, Origin, Reference as StoredReference, Seconds, StartRecord,
    Store,
};

use super::start::{DeviceReads, started_files};

/// Maximum number of earlier versions whose start is read, the most likely ones first.
const VERSIONS_MAX: usize = 4;

/// The versions of an image that may have its start.
#[derive(Debug, Clone, Copy)]
pub struct PreviousVersions<'a> {
    /// Manifest of the image.
    pub manifest: &'a Digest,
    /// Repositories that the image is from, as in [`Origin::repository`]. Only images of the same repositories are versions
    /// of the image.
    pub repositories: &'a [String],
    /// The content of the image's name until now. The start of that image is the most likely one.
    pub replaced: Option<&'a StoredReference>,
}

/// An image of the same repository, for one of its manifests.
struct PreviousVersion {
    image: ImageId,
    manifest: Digest,
    /// When its start or its traces were recorded.
    recorded: Seconds,
}

/// Returns the start of an earlier version of an image: of the one that it replaces, or else of the one whose start was
/// recorded last. It is a record, or the trace `default`. Data that cannot be read is left out, because a start only saves
/// time.
///
/// # Errors
/// [`OperationError`] if the images of the store cannot be listed.
pub fn previous_start(
    store: &Store,
    wanted: &PreviousVersions<'_>,
) -> Result<Option<StartRecord>, OperationError> {
    if wanted.repositories.is_empty() {
        return Ok(None);
    }
    // Most pulls update a name, and need not look at the other images.
    if let Some(StoredReference { image, manifest: Some(manifest), .. }) = wanted.replaced {
        let versions = wanted.versions(store, *image);
        let replaced = versions.iter().find(|it| it.manifest == *manifest);
        if let Some(start) = replaced.and_then(|it| start_of(store, it)) {
            return Ok(Some(start));
        }
    }
    let images = store.images.ids().map_err(OperationError::of("list", "images"))?;
    let mut versions: Vec<_> =
        images.into_iter().flat_map(|it| wanted.versions(store, it)).collect();
    versions.sort_by_key(|it| Reverse(it.recorded));
    Ok(versions.iter().take(VERSIONS_MAX).find_map(|it| start_of(store, it)))
}

impl PreviousVersions<'_> {
    /// Returns the versions that an image is, by its origins, if they have starts.
    fn versions(&self, store: &Store, image: ImageId) -> Vec<PreviousVersion> {
        let origins = store.downloads.origins(&image).unwrap_or_default();
        let is_version =
            |it: &&Origin| it.repository.as_ref().is_some_and(|it| self.repositories.contains(it));
        let manifests = origins.iter().filter(is_version).filter_map(|it| it.manifest);
        let version = |manifest: Digest| {
            let record = store.downloads.start_time(&manifest).ok().flatten();
            let recorded = record.max(store.downloads.traces_time(&image).ok().flatten())?;
            Some(PreviousVersion { image, manifest, recorded })
        };
        manifests.filter(|it| it != self.manifest).filter_map(version).collect()
    }
}

/// Returns the start of a version: its record, or its trace `default`.
fn start_of(store: &Store, version: &PreviousVersion) -> Option<StartRecord> {
    let PreviousVersion { image, manifest, .. } = version;
    let record = store.downloads.start(manifest).ok().flatten();
    if let Some(record) = record.filter(|it| !it.is_empty()) {
        return Some(record);
    }
    let traces = store.downloads.traces(image).ok()?;
    let reads = DeviceReads::of_trace(&traces.get(DEFAULT_TRACE)?.runs);
    let read = store.image_file(image).map_err(OperationError::of("open", "the image"));
    let read = read.and_then(|file| {
        started_files(&file, &reads, *manifest, true)
            .map_err(OperationError::of("read", "the image"))
    });
    let failed = |error: &OperationError| {
        let error: &dyn std::error::Error = error;
        tracing::debug!(%image, error, "ignoring the trace of an earlier version");
    };
    read.inspect_err(failed).ok().filter(|it| !it.is_empty())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::path::Path;
    use std::time::{Duration, SystemTime};

    use image::erofs::{Profile, Versions};
    use image::tree::Builder;
    use store::{OpenOptions, RefName, Reference, Who};

    use super::*;

    /// Adds an image of a repository, with this text as its manifest.
    fn add(store: &Store, text: &str, repository: Option<&str>) -> Digest {
        let mut builder = Builder::new();
        builder.subdirectory(image::tree::InodeId::ROOT, text.as_bytes()).unwrap();
        let manifest = Digest::sha256(text.as_bytes());
        let import = store.begin().unwrap();
        let mut draft = import.image().unwrap();
        let mut bytes = Vec::new();
        let profile = Profile::Composefs(Versions::default());
        image::erofs::write(&builder.finish(), &profile, &mut bytes).unwrap();
        draft.write_all(&bytes).unwrap();
        let image = draft.finish().unwrap();
        import.manifest(&manifest, text.as_bytes()).unwrap();
        let repository = repository.map(ToOwned::to_owned);
        import.add_origin(image, Origin { manifest: Some(manifest), repository });
        let name: RefName = text.parse().unwrap();
        let (form, created) = (store::Form::Objects, Seconds(0));
        import.set_ref(name, Reference { image, manifest: Some(manifest), form, created });
        import.commit().unwrap();
        manifest
    }

    /// Records a start that has this file, some seconds after 1970.
    fn record(store: &Store, path: &Path, manifest: &Digest, file: &str, seconds: u64) {
        let mut start = StartRecord::new(*manifest, true);
        if let Some(file) = start.add_file(file.as_bytes()) {
            start.add_part(file, 0..4096);
        }
        store.downloads.set_start(manifest, &start).unwrap();
        let name = format!("blobs/{}.start", manifest.to_string().replace(':', "-"));
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        File::open(path.join(name)).unwrap().set_modified(time).unwrap();
    }

    #[test]
    fn the_start_is_that_of_the_replaced_or_of_the_last_version() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = Store::open(&path, Who::this_process(), OpenOptions::create()).unwrap();
        let ours = Some("r.example/app");
        let [one, two, three, new] = ["one", "two", "three", "new"].map(|it| add(&store, it, ours));
        let other = add(&store, "other", Some("r.example/app2"));
        let local = add(&store, "local", None);
        let find = |repositories: &[&str], replaced: Option<&str>| {
            let replaced = replaced.map(|it| it.parse::<RefName>().unwrap());
            let replaced = replaced.map(|it| store.refs.get(&it).unwrap().unwrap());
            let replaced = replaced.as_ref();
            let repositories: Vec<_> = repositories.iter().map(|it| (*it).to_owned()).collect();
            let wanted = PreviousVersions { manifest: &new, repositories: &repositories, replaced };
            let found = previous_start(&store, &wanted).unwrap()?;
            let file = found.files().next().map(|it| String::from_utf8(it.to_vec()).unwrap());
            Some((found.started, file.unwrap()))
        };
        let app = ["r.example/app"];
        record(&store, &path, &other, "/other", 9000);
        record(&store, &path, &local, "/local", 9000);
        assert_eq!(find(&app, None), None);
        assert_eq!(find(&app, Some("other")), None, "it is of another repository");
        record(&store, &path, &one, "/one", 1000);
        assert_eq!(find(&app, None), Some((one, "/one".to_owned())));
        assert_eq!(find(&["r.example/app2"], None), Some((other, "/other".to_owned())));
        assert_eq!(find(&[], None), None);
        record(&store, &path, &two, "/two", 3000);
        record(&store, &path, &three, "/three", 2000);
        // Its own start is not an earlier one's.
        record(&store, &path, &new, "/new", 4000);
        assert_eq!(find(&app, None), Some((two, "/two".to_owned())));
        assert_eq!(find(&app, Some("one")), Some((one, "/one".to_owned())));
        assert_eq!(find(&app, Some("other")), Some((two, "/two".to_owned())));
        assert_eq!(find(&app, Some("new")), Some((two, "/two".to_owned())));
        // A damaged record is skipped.
        let name = format!("blobs/{}.start", two.to_string().replace(':', "-"));
        std::fs::remove_file(path.join(&name)).unwrap();
        std::fs::write(path.join(&name), "damaged").unwrap();
        assert_eq!(find(&app, None), Some((three, "/three".to_owned())));
    }
}
