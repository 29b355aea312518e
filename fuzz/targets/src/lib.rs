//! What each fuzz target does with its bytes. It panics when something is wrong; a refusal is right.
//!
//! A member of Quire's own workspace, whose tests run the corpora.
#![forbid(unsafe_code)]
#![expect(clippy::missing_panics_doc, reason = "a panic is what the fuzzer looks for")]

mod store_ops;

use image::dump::{self, Links, Strictness};
use image::erofs::read::{Image, Owners, View, examine, to_tree};
use image::erofs::{self, Profile, Version, Versions};
use image::tree::Tree;

/// An EROFS image: everything that can be asked of it ends, and answers or refuses.
pub fn erofs(bytes: &[u8]) {
    drop(examine(bytes, 1 << 20));
}

/// A composefs dump: what it says survives being written as a dump, and as an image of either version.
pub fn dump(bytes: &[u8]) {
    for strictness in [Strictness::Lenient, Strictness::Strict, Strictness::Exact] {
        let Ok(tree) = dump::parse(bytes, strictness) else { continue };
        let text = dump_text(&tree);
        let again = dump::parse(&text[..], Strictness::Strict).expect("a dump of ours is good");
        assert_eq!(text.escape_ascii().to_string(), dump_text(&again).escape_ascii().to_string());
        let mut images = Vec::new();
        for version in [Version::V0, Version::V1] {
            let profile = Profile::Composefs(Versions { min: version, max: version });
            let [first, second] = [&tree, &again].map(|tree| {
                let mut image = Vec::new();
                erofs::write(tree, &profile, &mut image).ok().map(|_| image)
            });
            assert!(first == second, "the same tree gives another image");
            images.extend(first);
        }
        for image in images {
            // Without contents: those are elsewhere, and the chunks of a file of more than 8126 TiB stand where C puts
            // them, which is not where EROFS looks.
            examine(&image, 0).expect("an image of ours is good");
            let image = Image::open(&image[..]).expect("an image of ours is good");
            to_tree(&image, View::Composefs(Owners::AsWritten))
                .expect("an image of ours has a tree");
        }
    }
}

fn dump_text(tree: &Tree) -> Vec<u8> {
    let mut text = Vec::new();
    dump::write(tree, Links::ToOwner, dump::directory_size, &mut text).expect("memory takes all");
    text
}

/// The JSON documents of OCI: an index, a manifest or a config.
pub fn manifest(bytes: &[u8]) {
    oci::manifest::exercise(bytes);
}

/// Requests of the kernel, one after the other, and an image that is served: each has an answer, no longer than was asked for.
/// Two bytes say how many bytes of requests there are; each request says how long it is, and the image is behind them.
pub fn fuse_tree(bytes: &[u8]) {
    use image::erofs::read::ShownImage;
    use kernel::fuse::{FuseOperation, FuseRequest};
    use serve::fuse::{AnswerMemory, FileTree, FuseAnswer, FuseView};
    let Some((length, rest)) = bytes.split_first_chunk() else { return };
    let Some((mut requests, image)) = rest.split_at_checked(u16::from_le_bytes(*length).into())
    else {
        return;
    };
    let Ok(image) = Image::open(image).and_then(ShownImage::new) else { return };
    let tree = FileTree::new(image, NoData, FuseView::Namespace, None);
    let mut memory = AnswerMemory::default();
    while let Some(length) = requests.first_chunk().map(|it| u32::from_le_bytes(*it)) {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let Some((one, rest)) = requests.split_at_checked(length.max(1)) else { return };
        requests = rest;
        let Ok(request) = FuseRequest::decode(one) else { continue };
        let most = match request.operation {
            FuseOperation::Read { size, .. }
            | FuseOperation::ReadDirectory { size, .. }
            | FuseOperation::GetXattr { size, .. }
            | FuseOperation::ListXattrs(size) => usize::try_from(size).unwrap_or(usize::MAX),
            _ => 4095,
        };
        match tree.answer(&request, &mut memory) {
            FuseAnswer::Bytes(bytes) => assert!(bytes.len() <= most, "{request:?}"),
            FuseAnswer::None => assert!(!request.operation.has_reply(), "{request:?}"),
            FuseAnswer::Error(_) | FuseAnswer::Body(_) => {}
        }
    }
}

/// A call of the mount service: it is read, or refused.
pub fn mounts_request(bytes: &[u8]) {
    drop(serve::mounts::read_ask(bytes));
}

/// An image that a client sends to the mount service: its copy has nothing that a user may not have.
pub fn mounts_image(bytes: &[u8]) {
    let _is_copied = is_copied(bytes);
}

/// Whether the mount service copies an image.
#[must_use]
pub fn is_copied(bytes: &[u8]) -> bool {
    serve::mounts::exercise_copy(bytes)
}

/// Objects of any bytes, and no devices.
#[derive(Debug)]
struct NoData;

impl serve::fuse::FileData for NoData {
    fn object(
        &self,
        _: &image::verity::ObjectId,
        size: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> std::io::Result<()> {
        let end = offset.checked_add(buffer.len() as u64);
        assert!(end.is_some_and(|end| end <= size), "it is asked for what is behind the end");
        Ok(())
    }

    fn devices(&self) -> Vec<&dyn image::erofs::read::ReadAt> {
        Vec::new()
    }
}

/// What commands do to a store, one after the other: after each check it is sound, and every ref leads where it should.
pub fn store_ops(bytes: &[u8]) {
    store_ops::run(bytes);
}

/// Tables of contents of layers, and what leads to them: what is accepted holds together.
pub fn chunked(bytes: &[u8]) {
    transfer::chunked::exercise(bytes);
}

/// The index of a device: what is accepted holds together.
pub fn data_index(bytes: &[u8]) {
    use std::io::Write as _;
    let directory = std::path::Path::new("/dev/shm");
    let file = tempfile::tempfile_in(directory).or_else(|_| tempfile::tempfile());
    let mut file = file.expect("there is room for a small file");
    file.write_all(bytes).expect("there is room for a small file");
    store::exercise_data_index(&file).expect("it is readable");
}

/// The head of a lazy device's index, and a group of windows: what is accepted is what would be written.
pub fn lazy_index(bytes: &[u8]) {
    use image::gzip::{Checkpoint, Start};
    use image::lazy::{Head, decode_windows, encode_windows};
    if let Ok(head) = Head::decode(bytes) {
        assert_eq!(head.encode().as_deref(), Ok(bytes));
    }
    for spans in 1..4 {
        let Some(windows) = decode_windows(bytes, spans) else { continue };
        let checkpoint =
            |window| Checkpoint { start: Start::Member, packed: 0, unpacked: 0, window };
        let checkpoints: Vec<_> = windows.into_iter().map(checkpoint).collect();
        assert_eq!(encode_windows(&checkpoints), [(0, bytes.to_vec())]);
    }
}

/// A request of the kernel's FUSE: what is accepted is walked to its end, and what is refused has its number if it has one.
pub fn fuse_request(bytes: &[u8]) {
    use kernel::fuse::{FuseOperation, FuseRequest};
    match FuseRequest::decode(bytes) {
        Ok(FuseRequest { operation: FuseOperation::ForgetSeveral(forgotten), .. }) => {
            // Each has 16 bytes.
            assert!(forgotten.count() <= bytes.len() / 16);
        }
        Ok(FuseRequest { operation: FuseOperation::Lookup(name), .. }) => {
            assert_eq!(name.to_bytes_with_nul(), &bytes[40..]);
        }
        Ok(_) => assert!(bytes.len() >= 40),
        Err(error) => assert_eq!(error.unique().is_some(), bytes.len() >= 40),
    }
}

/// The traces of an image: what is accepted is read again as the same.
pub fn traces(bytes: &[u8]) {
    if let Ok(traces) = store::Traces::decode(bytes) {
        assert_eq!(store::Traces::decode(&traces.encode()).ok(), Some(traces));
    }
}

/// The documents of an artifact that makes an image lazy: what is accepted holds together.
pub fn lazy_artifact(bytes: &[u8]) {
    transfer::lazy::artifact::exercise(bytes);
}

/// The recipe of a layer in such an artifact: the first byte says which objects are here. What is missing is fetched, once.
pub fn lazy_recipe(bytes: &[u8]) {
    transfer::lazy::update::exercise(bytes);
}

/// The image of an index that others made, over the devices that it names: what is accepted is what our writer writes.
pub fn lazy_image(bytes: &[u8]) {
    let _either = is_lazy_image(bytes);
}

/// Whether an image is accepted.
#[must_use]
pub fn is_lazy_image(bytes: &[u8]) -> bool {
    use image::digest::Digest;
    use image::lazy::Head;
    let Ok(image) = Image::open(bytes) else { return false };
    let head = |slot: &erofs::read::DeviceSlot| {
        let (device, device_bytes) = (slot.device_id()?, slot.bytes()?);
        Some(Head {
            device,
            device_bytes,
            blob: Digest::sha256(b""),
            blob_bytes: 1,
            diff_id: Digest::sha256(b""),
            tar_bytes: device_bytes.saturating_sub(512),
            tail: Vec::new(),
            units: Vec::new(),
            spans: Vec::new(),
            groups: Vec::new(),
        })
    };
    let heads: Vec<_> = image.devices().iter().filter_map(head).collect();
    let is_accepted = transfer::lazy::check_image(bytes, &heads).is_ok();
    if is_accepted {
        examine(bytes, 1 << 20).expect("an image of ours is good");
    }
    is_accepted
}

/// A gzip blob: inflated as another decoder does it, and each of its spans alone gives the same bytes.
pub fn gzip_span(bytes: &[u8]) {
    use flate2::bufread::MultiGzDecoder;
    use image::gzip::{Checkpoint, Indexer};
    use std::io::Read as _;
    /// More would only be slow.
    const MAX: u64 = 8 << 20;
    let mut indexer = Indexer::new(std::io::BufReader::with_capacity(1000, bytes));
    let mut ours = Vec::new();
    let read = (&mut indexer).take(MAX).read_to_end(&mut ours);
    let mut theirs = Vec::new();
    let other = MultiGzDecoder::new(bytes).take(MAX).read_to_end(&mut theirs);
    assert_eq!(read.is_ok(), other.is_ok(), "{read:?} {other:?}");
    if read.is_err() {
        return;
    }
    assert!(ours == theirs, "two decoders give other bytes");
    if ours.len() as u64 == MAX {
        return;
    }
    let Ok(checkpoints) = indexer.finish() else { return };
    let end = (bytes.len() as u64, ours.len() as u64);
    let ends = checkpoints.iter().skip(1).map(|it| (it.packed, it.unpacked)).chain([end]);
    let part = |bytes: &[u8], from: u64, to: u64| {
        let [from, to] = [from, to].map(|it| usize::try_from(it).expect("it is in memory"));
        bytes[from..to].to_vec()
    };
    for (one, (packed, unpacked)) in checkpoints.iter().zip(ends) {
        let needs = one.needs(packed);
        let span = part(bytes, needs.start, needs.end);
        let expect = part(&ours, one.unpacked, unpacked);
        let length = unpacked - one.unpacked;
        assert_eq!(one.inflate(&span, length).as_deref(), Ok(&expect[..]));
        // A checkpoint of somebody else: any bytes or an error.
        let wrong = Checkpoint { window: checkpoints[0].window.clone(), ..one.clone() };
        let _any = wrong.inflate(&span[span.len() / 2..], length);
    }
}

/// A layer's tar: the events that it gives are enough to make the same tar again.
pub fn tar_layer(bytes: &[u8]) {
    image::tar::exercise(bytes);
}
