//! Computes the ids that other programs seal: those of composefs-rs and of C's `mkcomposefs`.

use std::collections::BTreeMap;
use std::io;

use image::composefs_rs::{
    ComposefsLayout, Draft, DraftFile, LabelError, LabelPolicy, Lookup, POLICY_MAX, PolicyText,
    SealedTreeError, policy_name, write_layout2,
};
use image::digest::Digest;
use image::erofs::{ErofsWriteError, Profile, Version, Versions};
use image::tar::recipe::{RebuildError, Skeleton, object_at};
use image::tar::{Entry, Kind, Reader, TarError, UnusualTar};
use image::tree::{Content, Location, Node, Tree, TreeError};
use image::verity::{Algorithm, Hasher, ImageId, ObjectId, VerityDigest};
use oci::manifest::is_erofs_layer;
use store::{Store, StoredLayerError};

use super::files::{self, FileContents};
use super::{ExportError, Options};
use crate::stored::StoredImage;

/// Files of up to this many bytes are in the image itself. composefs-rs: `INLINE_CONTENT_MAX_V0`.
const INLINE_MAX: u64 = 64;

/// The tree whose id is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SealedTree {
    /// That of `cfsctl oci compute-id`.
    Oci,
    /// That of `cfsctl oci compute-id --bootable`.
    Bootable,
    /// The image's own tree, as `mkcomposefs --min-version=1` writes it.
    Unchanged,
}

/// The image whose digest is the id.
#[derive(Debug, Clone, Copy)]
pub struct IdFormat {
    /// Algorithm of the id, and of the objects that the image names.
    pub algorithm: Algorithm,
    /// ComposefsLayout of the image. An unchanged tree has V1.
    pub layout: ComposefsLayout,
}

/// The reason why an id cannot be computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ComposefsIdError {
    #[error(transparent)]
    Export(#[from] ExportError),
    /// composefs-rs makes no image.
    #[error("composefs-rs makes no image of layer {diff_id}")]
    Layer { diff_id: Digest, source: Box<SealedTreeError> },
    /// composefs-rs makes no image.
    #[error("composefs-rs makes no image of this tree")]
    Draft(#[source] SealedTreeError),
    /// The layer has a file that composefs-rs does not import.
    #[error("composefs-rs makes no image of layer {diff_id}: it has the sparse file \"{}\"", path.escape_ascii())]
    Sparse { diff_id: Digest, path: Vec<u8> },
    /// The layer has an entry that composefs-rs reads differently, or refuses.
    #[error(
        "composefs-rs makes no image of layer {diff_id}, or another one: \"{}\" {what}",
        entry.escape_ascii()
    )]
    Unusual { diff_id: Digest, entry: Vec<u8>, what: UnusualTar },
    /// composefs-rs imports only tars.
    #[error("composefs-rs makes no image of layer {0}, which is an EROFS image")]
    ErofsLayer(Digest),
    /// The entries of a layer cannot be read.
    #[error("cannot read the entries of layer {diff_id}")]
    Entries { diff_id: Digest, source: Box<TarError> },
    /// The store's record of a layer cannot be read.
    #[error("cannot read layer {diff_id}")]
    Recipe { diff_id: Digest, source: Box<RebuildError> },
    /// The store's record of a layer cannot be read.
    #[error("cannot read layer {diff_id}")]
    Stored { diff_id: Digest, source: Box<StoredLayerError> },
    /// The store's record of a layer does not name the object of a file.
    #[error("the store does not know all files of layer {diff_id}: `quire pull` the image again")]
    Incomplete { diff_id: Digest },
    #[error("cannot label the files by the image's SELinux policy")]
    Labels(#[from] LabelError),
    /// A file of the SELinux policy is too large.
    #[error("the file /{0} of the SELinux policy is larger than 8 MiB")]
    PolicySize(String),
    #[error("cannot make the tree")]
    Tree(#[from] TreeError),
    #[error("cannot make the image")]
    Image(#[source] Box<ErofsWriteError>),
}

impl ComposefsIdError {
    fn layer(diff_id: Digest, source: SealedTreeError) -> Self {
        Self::Layer { diff_id, source: Box::new(source) }
    }

    fn entries(diff_id: Digest, source: TarError) -> Self {
        Self::Entries { diff_id, source: Box::new(source) }
    }
}

/// Computes the id of an image of the store. `documents` are the image's manifest and config, if it has any: then its
/// layers are read, otherwise its tree.
///
/// # Errors
/// [`ComposefsIdError`], also for images that composefs-rs refuses.
pub fn composefs_id(
    store: &Store,
    image: &ImageId,
    documents: Option<&StoredImage>,
    tree: SealedTree,
    format: IdFormat,
    options: &Options<'_>,
) -> Result<VerityDigest, ComposefsIdError> {
    let algorithm = format.algorithm;
    let made = match (tree, documents) {
        (SealedTree::Unchanged, _) => {
            let mut found = files::tree(store, image)?;
            let named = found.files().filter_map(|(_, content)| match content {
                Content::External { object: Some(object), size, .. } => Some((object, size)),
                _ => None,
            });
            if let Some(ids) = ids(store, named.collect(), algorithm, options)? {
                found.replace_objects(|object| ids.get(object).copied())?;
            }
            found
        }
        (_, Some(documents)) => {
            let mut draft = Draft::new();
            for diff_id in documents.config.diff_ids() {
                layer(store, diff_id, &mut draft, options)?;
            }
            finish(store, draft, tree, format, options)?
        }
        (_, None) => {
            let draft = Draft::from_tree(&files::tree(store, image)?);
            let draft = draft.map_err(ComposefsIdError::Draft)?;
            finish(store, draft, tree, format, options)?
        }
    };
    id(&made, format)
}

/// Returns the digest of a tree's image.
fn id(tree: &Tree, format: IdFormat) -> Result<VerityDigest, ComposefsIdError> {
    let mut hasher = Hasher::new(format.algorithm);
    let profile = Profile::Composefs(Versions { min: Version::V1, max: Version::V1 });
    let written = match format.layout {
        ComposefsLayout::V1 => image::erofs::write(tree, &profile, &mut hasher).map(drop),
        ComposefsLayout::V2 => write_layout2(tree, &mut hasher),
    };
    written.map_err(|source| ComposefsIdError::Image(Box::new(source)))?;
    Ok(hasher.finish())
}

/// Transforms a draft, and makes the tree.
fn finish(
    store: &Store,
    mut draft: Draft,
    tree: SealedTree,
    format: IdFormat,
    options: &Options<'_>,
) -> Result<Tree, ComposefsIdError> {
    draft.transform().map_err(ComposefsIdError::Draft)?;
    if tree == SealedTree::Bootable {
        draft.transform_for_boot().map_err(ComposefsIdError::Draft)?;
        if let Some(mut policy) = policy(store, &draft, options)? {
            draft.relabel(&mut policy, &|| options.go_on().is_err()).map_err(
                |error| match error {
                    LabelError::Stopped => ExportError::Cancelled.into(),
                    error => ComposefsIdError::Labels(error),
                },
            )?;
        }
    }
    draft.check_devices().map_err(ComposefsIdError::Draft)?;
    options.go_on()?;
    let ids = ids(store, draft.objects(), format.algorithm, options)?;
    Ok(match ids {
        None => draft.into_tree(format.layout, |object| *object)?,
        Some(ids) => {
            draft.into_tree(format.layout, |object| ids.get(object).copied().unwrap_or(*object))?
        }
    })
}

/// Returns the ids of objects with another algorithm, from their bytes. Returns `None` if the store has that
/// algorithm.
fn ids(
    store: &Store,
    objects: BTreeMap<ObjectId, u64>,
    algorithm: Algorithm,
    options: &Options<'_>,
) -> Result<Option<BTreeMap<ObjectId, ObjectId>>, ExportError> {
    if store.algorithm() == algorithm {
        return Ok(None);
    }
    let objects: Vec<_> = objects.into_iter().collect();
    let hashed = options.each(objects.len(), |at| {
        let (object, size) = objects[at];
        let content = Content::External { size, object: Some(object), location: Location::None };
        let mut hasher = Hasher::new(algorithm);
        FileContents::new(store, options).give(b"", content, &mut |piece| {
            hasher.update(piece);
            Ok(())
        })?;
        Ok((object, ObjectId::new(hasher.finish())))
    })?;
    Ok(Some(hashed.into_iter().collect()))
}

/// Adds the entries of a stored layer.
fn layer(
    store: &Store,
    diff_id: &Digest,
    draft: &mut Draft,
    options: &Options<'_>,
) -> Result<(), ComposefsIdError> {
    let diff_id = *diff_id;
    let stored = |source| ComposefsIdError::Stored { diff_id, source: Box::new(source) };
    let rebuilt = |source| ComposefsIdError::Recipe { diff_id, source: Box::new(source) };
    let found = store.layers.open(&diff_id).map_err(stored)?;
    let found = found.ok_or(ExportError::Absent(diff_id))?;
    if found.info().blobs.iter().any(|it| is_erofs_layer(&it.media_type)) {
        return Err(ComposefsIdError::ErofsLayer(diff_id));
    }
    let skeleton = Skeleton::with_positions(found.recipe().map_err(stored)?);
    let (skeleton, places) = skeleton.map_err(rebuilt)?;
    let mut reader = Reader::new(skeleton);
    let mut last: Option<(u64, DraftFile)> = None;
    loop {
        options.go_on()?;
        let next = reader.next_entry();
        let next = next.map_err(|source| ComposefsIdError::entries(diff_id, source))?;
        // The object is known only after the entry's content was passed.
        if let Some((position, file)) = last.take() {
            let object = object_at(&places, position);
            draft.set_object(file, object.ok_or(ComposefsIdError::Incomplete { diff_id })?);
        }
        let Some(mut entry) = next else { break };
        let is_whole = match entry.segments {
            [] => entry.size == 0,
            [it] => it.offset == 0 && it.length == entry.size,
            _ => false,
        };
        if !is_whole {
            return Err(ComposefsIdError::Sparse { diff_id, path: entry.path.to_vec() });
        }
        let position = entry.position;
        last = add(draft, &mut entry, diff_id)?.map(|file| (position, file));
    }
    match reader.unusual() {
        Some((entry, what)) => {
            Err(ComposefsIdError::Unusual { diff_id, entry: entry.to_vec(), what })
        }
        None => Ok(()),
    }
}

/// Adds an entry. Returns the file whose object must be set.
fn add<R: io::Read>(
    draft: &mut Draft,
    entry: &mut Entry<'_, R>,
    diff_id: Digest,
) -> Result<Option<DraftFile>, ComposefsIdError> {
    let mut bytes = Vec::new();
    let node = match entry.kind {
        Kind::Hardlink(target) => {
            let linked = draft.link(entry.path, target);
            linked.map_err(|source| ComposefsIdError::layer(diff_id, source))?;
            return Ok(None);
        }
        Kind::Regular if entry.size <= INLINE_MAX => {
            let mut buffer = [0; 64];
            loop {
                let read = entry.content.read(&mut buffer);
                match read.map_err(|source| ComposefsIdError::entries(diff_id, source))? {
                    0 => break,
                    count => bytes.extend_from_slice(&buffer[..count]),
                }
            }
            Node::Regular(Content::Inline(&bytes))
        }
        Kind::Regular => {
            let (size, location) = (entry.size, Location::None);
            Node::Regular(Content::External { size, object: None, location })
        }
        Kind::Symlink(target) => Node::Symlink(target),
        Kind::CharDevice(number) => Node::CharDevice(number),
        Kind::BlockDevice(number) => Node::BlockDevice(number),
        Kind::Fifo => Node::Fifo,
        Kind::Directory => Node::Directory,
    };
    let added = draft.entry(entry.path, &entry.metadata, entry.xattrs.clone(), node);
    added.map_err(|source| ComposefsIdError::layer(diff_id, source))
}

const SELINUX: &str = "etc/selinux";

/// Reads the image's SELinux policy, if it has one.
fn policy(
    store: &Store,
    draft: &Draft,
    options: &Options<'_>,
) -> Result<Option<LabelPolicy>, ComposefsIdError> {
    let read = |directory: &str, name: &str| {
        let found = draft.file(directory, name).map_err(ComposefsIdError::Draft)?;
        let Lookup::Found(content) = found else { return Ok(None) };
        let path = format!("{directory}/{name}");
        if content.size() > POLICY_MAX {
            return Err(ComposefsIdError::PolicySize(path));
        }
        let mut bytes = Vec::new();
        let mut contents = FileContents::new(store, options);
        contents.give(path.as_bytes(), content, &mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(Some(bytes))
    };
    let Some(config) = read(SELINUX, "config")? else { return Ok(None) };
    let Some(name) = policy_name(&config)? else { return Ok(None) };
    let directory = format!("{SELINUX}/{name}/contexts/files");
    let mut text = PolicyText::default();
    for suffix in ["", ".local", ".homedirs"] {
        let found = read(&directory, &format!("file_contexts{suffix}"))?;
        if found.is_none() && suffix.is_empty() {
            let path = format!("{directory}/file_contexts");
            return Err(ComposefsIdError::Draft(SealedTreeError::NotRegular(path)));
        }
        text.contexts.extend(found);
    }
    for suffix in [".subs", ".subs_dist"] {
        text.substitutions.extend(read(&directory, &format!("file_contexts{suffix}"))?);
    }
    Ok(Some(LabelPolicy::parse(&text)?))
}
