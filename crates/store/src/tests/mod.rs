//! Tests of the store as a whole, with shared helpers.

mod concurrency;
mod damage;
pub(crate) mod data;
mod data_damage;
mod format;
mod holes;
mod import;
mod interrupted;
mod lazy;
mod lazy_devices;
mod lazy_windows;
mod names;
mod pieces;
mod ranges;
mod records;
mod sealing;
pub(crate) mod snapshots;
mod trim;
mod unproven;
mod unsynced;

use std::collections::BTreeMap;
use std::path::Path;

use tempfile::TempDir;

use image::erofs::{Profile, Versions, write};
use image::tar::{Segment, recipe};
use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, XattrsId};
use image::verity::{Algorithm, ImageId};

use crate::{
    Blob, Digest, Form, FsckOptions, LayerInfo, OpenOptions, RefName, Reference, Seconds, Store,
    Transaction,
};

/// The time of the tests.
pub(crate) const NOW: Seconds = Seconds(1_000_000_000);

pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Files of a root file system, by name. Up to 64 bytes are stored in the image, longer files in an object.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// Returns `count` files that every sample has, and as many that only this sample has.
pub(crate) fn sample(name: &str, count: usize) -> Files {
    let mut files = Files::new();
    files.insert("small".into(), name.as_bytes().to_vec());
    for at in 0..count {
        files.insert(format!("shared-{at}"), vec![b's'; 100 + at * 700]);
        files.insert(
            format!("own-{at}"),
            format!("{name} {at} ").repeat(20 + at * 100).into_bytes(),
        );
    }
    files
}

pub(crate) fn name(text: &str) -> RefName {
    text.parse().unwrap()
}

pub(crate) fn open(directory: &Path) -> Store {
    Store::open(directory, crate::Who::this_process(), OpenOptions::create()).unwrap()
}

/// Adds everything except the ref: objects, an image, a layer, a config and a manifest.
pub(crate) fn add(import: &Transaction<'_>, files: &Files) -> Result<Reference, Failure> {
    add_as(import, files, Form::Objects)
}

/// As [`add`], in any storage form.
fn add_as(import: &Transaction<'_>, files: &Files, form: Form) -> Result<Reference, Failure> {
    let mut builder = Builder::new();
    let mut layer = import.layer()?;
    let mut recipe = recipe::Writer::new(&mut layer, Algorithm::Sha256)?;
    let mut tar = Vec::new();
    let mut objects = Vec::new();
    let mut packed = Vec::new();
    for (name, bytes) in files {
        let entry = format!("{name} {}\n", bytes.len());
        recipe.verbatim(entry.as_bytes())?;
        tar.extend_from_slice(entry.as_bytes());
        tar.extend_from_slice(bytes);
        let content = if bytes.len() > 64 {
            let object = match form {
                Form::Objects => import.object(bytes)?,
                _ => data::id(bytes),
            };
            if !objects.contains(&object) {
                objects.push(object);
                packed.push(bytes.clone());
            }
            let size = bytes.len() as u64;
            let whole = Segment { offset: 0, length: size };
            recipe.content(&[whole], recipe::Content::Object(&object))?;
            Content::External { size, object: Some(object), location: Location::Object }
        } else {
            recipe.verbatim(bytes)?;
            Content::Inline(bytes)
        };
        let node = Node::Regular(content);
        let inode = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node)?;
        builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal)?;
    }
    recipe.finish()?;
    let tree = builder.finish();
    let image = match form {
        Form::Objects => {
            let mut image = import.image()?;
            write(&tree, &Profile::Composefs(Versions::default()), &mut image)?;
            image.finish()?
        }
        _ => data::add_native(import, &tree, &packed)?,
    };

    let diff_id = Digest::sha256(&tar);
    let media_type = "application/vnd.oci.image.layer.v1.tar".to_owned();
    let size = tar.len() as u64;
    let blobs =
        vec![Blob { digest: diff_id, size, media_type, is_hashed: true, repositories: Vec::new() }];
    layer.finish(LayerInfo { diff_id, size, blobs, objects })?;
    let config = format!(r#"{{"rootfs":{{"type":"layers","diff_ids":["{diff_id}"]}}}}"#);
    let config_digest = Digest::sha256(config.as_bytes());
    import.manifest(&config_digest, config.as_bytes())?;
    let manifest = format!(r#"{{"config":{{"digest":"{config_digest}"}}}}"#);
    let digest = Digest::sha256(manifest.as_bytes());
    import.manifest(&digest, manifest.as_bytes())?;
    Ok(Reference { image, manifest: Some(digest), form, created: Seconds(1) })
}

pub(crate) fn import(store: &Store, ref_name: &str, files: &Files) -> Result<ImageId, Failure> {
    import_as(store, ref_name, files, Form::Objects)
}

pub(crate) fn import_as(
    store: &Store,
    ref_name: &str,
    files: &Files,
    form: Form,
) -> Result<ImageId, Failure> {
    let transaction = store.begin()?;
    let reference = add_as(&transaction, files, form)?;
    let image = reference.image;
    transaction.set_ref(name(ref_name), reference);
    transaction.commit()?;
    Ok(image)
}

/// Checks that the whole store is sound, and returns the image of each ref.
pub(crate) fn check(store: &Store) -> Result<BTreeMap<String, ImageId>, Failure> {
    let report = store.fsck_deep(FsckOptions { threads: 1 })?;
    if !report.is_sound() {
        return Err(format!("{:#?}", report.damage).into());
    }
    let refs = store.refs.all()?;
    Ok(refs.into_iter().map(|(name, reference)| (name.to_string(), reference.image)).collect())
}

/// Checks that after `gc` the store has exactly the items that its refs need.
pub(crate) fn check_clean(store: &Store) -> Result<BTreeMap<String, ImageId>, Failure> {
    const ATTEMPTS: u32 = 50;
    let mut left = String::new();
    for _ in 0..ATTEMPTS {
        store.gc(NOW)?;
        let refs = check(store)?;
        let plan = store.plan_gc(NOW)?;
        let tmp = store.tmp.list()?;
        if plan.garbage.is_empty() && plan.dead.is_empty() && tmp.is_empty() {
            return Ok(refs);
        }
        left = format!("left after gc: {plan:?} {tmp:?}");
        // A child that another test has just forked may use an item, as `eventually` explains.
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    Err(left.into())
}

/// Returns a directory in which syncing takes no time, if there is one, for tests that make thousands of stores.
fn fast_directory() -> TempDir {
    TempDir::new_in("/dev/shm").unwrap_or_else(|_| TempDir::new().unwrap())
}

/// Waits until a condition is true. A child that another test has just forked has our descriptors, with their locks
/// and leases, until it calls exec.
fn eventually(mut is_so: impl FnMut() -> bool) {
    for _ in 0..400 {
        if is_so() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    panic!("not so after two seconds");
}

/// Returns the number of warnings and errors that this thread logs during `work`.
fn warnings(work: impl FnOnce()) -> u64 {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use tracing::span::{Attributes, Id, Record};
    struct Count(Arc<AtomicU64>);
    impl tracing::Subscriber for Count {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            *metadata.level() <= tracing::Level::WARN
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }
    let count = Arc::new(AtomicU64::new(0));
    tracing::subscriber::with_default(Count(Arc::clone(&count)), work);
    count.load(Ordering::Relaxed)
}

/// Returns an environment variable that sets how thorough a slow test is.
fn setting(name: &str) -> Option<String> {
    #[expect(clippy::disallowed_methods, reason = "tests have no other arguments")]
    std::env::var(name).ok()
}

/// Pseudorandom numbers (xorshift64*). The same seed gives the same numbers.
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
