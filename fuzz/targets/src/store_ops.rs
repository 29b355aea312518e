//! Runs commands that bytes select on a store, and compares the store with a model.

use std::collections::BTreeMap;
use std::path::Path;

use image::erofs::{self, Profile, Versions};
use image::tar::{Segment, recipe};
use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, XattrsId};
use image::verity::{Algorithm, ImageId};
use store::{
    Blob, Digest, Form, FsckOptions, LayerInfo, OpenOptions, RefError, RefName, Reference, Seconds,
    Store, Transaction,
};
use tempfile::TempDir;

/// Time of all commands.
const NOW: Seconds = Seconds(1_000_000_000);

/// Maximum number of commands. More would only take longer.
const OPERATIONS_MAX: usize = 200;

/// The expected image of each ref.
type Refs = BTreeMap<RefName, ImageId>;

/// An import that is not committed yet, and the expected refs after its commit.
struct Import<'s> {
    transaction: Transaction<'s>,
    refs: Refs,
}

/// Runs the commands. Each takes two bytes: its kind and its operand.
pub(super) fn run(bytes: &[u8]) {
    // Prefer a file system in memory, where syncing is cheap.
    let directory = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new());
    let directory = directory.expect("there is room for a small store");
    let mut operations = bytes.chunks_exact(2).take(OPERATIONS_MAX);
    let mut refs = Refs::new();
    while session(directory.path(), &mut operations, &mut refs) {}
    let store = Store::open(directory.path(), store::Who::this_process(), OpenOptions::create())
        .expect("it was there before");
    check(&store, &refs);
    store.gc(NOW).expect("nothing is damaged");
    check(&store, &refs);
}

/// Opens the store and runs commands until one reopens the store (`true`), or all are done (`false`).
fn session<'a>(
    directory: &Path,
    operations: &mut impl Iterator<Item = &'a [u8]>,
    refs: &mut Refs,
) -> bool {
    let store = Store::open(directory, store::Who::this_process(), OpenOptions::create())
        .expect("a store can be made");
    let mut import: Option<Import<'_>> = None;
    for operation in operations {
        let &[what, on] = operation else { return false };
        let begin = || {
            let transaction = store.begin().expect("there is room");
            Import { transaction, refs: Refs::new() }
        };
        match what % 9 {
            0 => drop(import.get_or_insert_with(begin)),
            1 => {
                let import = import.get_or_insert_with(begin);
                let reference = add(&import.transaction, on & 0x3f).expect("there is room");
                let name = name(on >> 6);
                import.refs.insert(name.clone(), reference.image);
                import.transaction.set_ref(name, reference);
            }
            2 => {
                if let Some(Import { transaction, refs: new }) = import.take() {
                    transaction.commit().expect("gc has left what the import needs");
                    refs.extend(new);
                }
            }
            3 => drop(import.take()),
            4 => {
                let (from, to) = (name(on & 3), name(on >> 2));
                if let Some(reference) = store.refs.get(&from).expect("refs are readable") {
                    store.set_ref(&to, &reference).expect("what it leads to is there");
                    refs.insert(to, reference.image);
                }
            }
            5 => {
                let name = name(on);
                let removed = match store.remove_ref(&name) {
                    Ok(removed) => Some(removed.expect("the ref is readable").image),
                    Err(RefError::Absent(_)) => None,
                    Err(error) => panic!("{name}: {error}"),
                };
                assert_eq!(removed, refs.remove(&name), "{name}");
            }
            6 => drop(store.gc(NOW).expect("nothing is damaged")),
            7 => return true,
            _ => check(&store, refs),
        }
    }
    false
}

fn name(number: u8) -> RefName {
    let text = ["one", "two:x", "a/b/three", "four"][usize::from(number % 4)];
    text.parse().expect("it is a good name")
}

/// Checks that no file is damaged, and that every ref leads to the expected image, which can be read.
fn check(store: &Store, refs: &Refs) {
    let report = store.fsck_deep(FsckOptions { threads: 1 }).expect("the store is readable");
    assert!(report.is_sound(), "{:#?}", report.damage);
    let found = store.refs.all().expect("refs are readable");
    let found: Refs = found.into_iter().map(|(name, it)| (name, it.image)).collect();
    assert_eq!(found, *refs);
    for image in refs.values() {
        drop(store.open_image(image).expect("a ref's image is there"));
    }
}

/// Adds an image with a file for each bit of `files`, and its layer, config and manifest.
fn add(import: &Transaction<'_>, files: u8) -> Result<Reference, Box<dyn std::error::Error>> {
    let mut builder = Builder::new();
    let mut layer = import.layer()?;
    let mut recipe = recipe::Writer::new(&mut layer, Algorithm::Sha256)?;
    let (mut tar, mut objects) = (Vec::new(), Vec::new());
    for number in (0..6_u8).filter(|number| files >> number & 1 == 1) {
        // The first file is small enough to be stored in the image.
        let bytes = vec![b'a' + number; 40 + usize::from(number) * 1000];
        tar.extend_from_slice(&bytes);
        let length = bytes.len() as u64;
        let content = if number == 0 {
            recipe.verbatim(&bytes)?;
            Content::Inline(&bytes)
        } else {
            let object = import.object(&bytes)?;
            objects.push(object);
            recipe.content(&[Segment { offset: 0, length }], recipe::Content::Object(&object))?;
            let location = Location::Object;
            Content::External { size: length, object: Some(object), location }
        };
        let inode = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, Node::Regular(content))?;
        builder.insert(InodeId::ROOT, &[b'a' + number], inode, Link::Equal)?;
    }
    recipe.finish()?;
    let mut image = import.image()?;
    erofs::write(&builder.finish(), &Profile::Composefs(Versions::default()), &mut image)?;
    let image = image.finish()?;
    let diff_id = Digest::sha256(&tar);
    let size = tar.len() as u64;
    let blobs = vec![Blob {
        digest: diff_id,
        size,
        media_type: String::new(),
        is_hashed: true,
        repositories: Vec::new(),
    }];
    layer.finish(LayerInfo { diff_id, size, blobs, objects })?;
    let config = format!(r#"{{"rootfs":{{"type":"layers","diff_ids":["{diff_id}"]}}}}"#);
    let config_digest = Digest::sha256(config.as_bytes());
    import.manifest(&config_digest, config.as_bytes())?;
    let manifest = format!(r#"{{"config":{{"digest":"{config_digest}"}}}}"#);
    let manifest_digest = Digest::sha256(manifest.as_bytes());
    import.manifest(&manifest_digest, manifest.as_bytes())?;
    let created = Seconds(1);
    Ok(Reference { image, manifest: Some(manifest_digest), form: Form::Objects, created })
}
