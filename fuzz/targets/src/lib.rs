//! The fuzz targets, which each process arbitrary bytes. A target panics if something is wrong; an error is a valid
//! result.
//!
//! This crate is a member of Quire's own workspace, whose tests run the corpora.
#![forbid(unsafe_code)]
#![expect(clippy::missing_panics_doc, reason = "a panic is what the fuzzer looks for")]

mod store_ops;

use image::dump::{self, Links, Strictness};
use image::erofs::read::{Image, Owners, View, examine, to_tree};
use image::erofs::{self, Profile, Version, Versions};
use image::tree::Tree;

/// Reads an EROFS image: every read ends with a result or an error.
pub fn erofs(bytes: &[u8]) {
    drop(examine(bytes, 1 << 20));
}

/// Parses a composefs dump: its tree must be unchanged when written as a dump, and as an image of either version.
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
            // Read no contents: they are in other files, and C puts the chunk table of a file of more than 8126 TiB
            // in another place than where EROFS reads it.
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

/// Reads the headers of a program, whose loader and libraries an index may need. Returns whether it has a loader.
#[must_use]
pub fn elf(bytes: &[u8]) -> bool {
    transfer::lazy::exercise_elf(bytes)
}

/// Parses the JSON documents of OCI: an index, a manifest or a config.
pub fn manifest(bytes: &[u8]) {
    oci::manifest::exercise(bytes);
}

/// Parses a file with a private key, and the stored signatures of an image. Encrypted keys are not decrypted, because
/// that takes time by design.
pub fn signing(bytes: &[u8]) {
    use oci::policy::Evidence;
    use oci::signing::{KeyFile, Passphrase};
    if let Ok(file) = KeyFile::parse(bytes)
        && !file.is_encrypted()
    {
        drop(file.unlock(&Passphrase::new(Vec::new())));
    }
    let Ok(evidence) = Evidence::decode(bytes) else { return };
    for signature in evidence.all_signatures() {
        signature.claim().expect("only signatures with a claim are kept");
    }
    // Names of registries may lose a default port at the first time.
    let again = Evidence::decode(&evidence.encode()).expect("evidence of ours is good");
    assert!(again.all_signatures().eq(evidence.all_signatures()));
    assert!(again.own == evidence.own && again.indexes == evidence.indexes);
}

/// Processes a sequence of kernel requests for a served image: each gets a response that is at most as long as
/// requested. The first two bytes are the length of the requests; each request states its length, and the image
/// follows them.
pub fn fuse_tree(bytes: &[u8]) {
    use image::erofs::read::ShownImage;
    use serve::fuse::{FileTree, FuseView};
    let Some((length, rest)) = bytes.split_first_chunk() else { return };
    let Some((requests, image)) = rest.split_at_checked(u16::from_le_bytes(*length).into()) else {
        return;
    };
    for view in [FuseView::Namespace, FuseView::Objects] {
        let Ok(image) = Image::open(image).and_then(ShownImage::new) else { return };
        let mut tree = FileTree::new(image, NoData, view, None);
        // The places are only for images whose directories can be read.
        let _added = tree.add_places(&["/etc/hosts", "/proc/", "/a/b/c"]);
        answer_all(&tree, requests);
    }
}

/// Sends requests to a tree. Each is preceded by its length.
fn answer_all(tree: &serve::fuse::FileTree<&[u8], NoData>, mut requests: &[u8]) {
    use kernel::fuse::{FuseOperation, FuseRequest};
    use serve::fuse::{AnswerMemory, FuseAnswer};
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

/// Parses a call to the mount service.
pub fn mounts_request(bytes: &[u8]) {
    drop(serve::mounts::read_ask(bytes));
}

/// Copies an image that a client sends to the mount service: the copy must not contain anything that a user may not
/// have.
pub fn mounts_image(bytes: &[u8]) {
    let _is_copied = is_copied(bytes);
}

/// Whether the mount service accepts an image and copies it.
#[must_use]
pub fn is_copied(bytes: &[u8]) -> bool {
    serve::mounts::exercise_copy(bytes)
}

/// A source of objects with arbitrary bytes, and of no devices.
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

/// Runs a sequence of commands on a store: after each check the store is sound, and every ref leads to the right
/// image.
pub fn store_ops(bytes: &[u8]) {
    store_ops::run(bytes);
}

/// Parses layers' tables of contents and their footers: accepted ones must be consistent.
pub fn chunked(bytes: &[u8]) {
    transfer::chunked::exercise(bytes);
}

/// Parses the index of a device: an accepted one must be consistent.
pub fn data_index(bytes: &[u8]) {
    use std::io::Write as _;
    let directory = std::path::Path::new("/dev/shm");
    let file = tempfile::tempfile_in(directory).or_else(|_| tempfile::tempfile());
    let mut file = file.expect("there is room for a small file");
    file.write_all(bytes).expect("there is room for a small file");
    store::exercise_data_index(&file).expect("it is readable");
}

/// Parses the head of a lazy device's index, and a group of windows: accepted ones must be encoded as the same bytes.
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

/// Decodes a FUSE request of the kernel: an accepted one is read to its end, and an error has the request's number if
/// any.
pub fn fuse_request(bytes: &[u8]) {
    use kernel::fuse::{FuseOperation, FuseRequest};
    match FuseRequest::decode(bytes) {
        Ok(FuseRequest { operation: FuseOperation::ForgetSeveral(forgotten), .. }) => {
            // Each item takes 16 bytes.
            assert!(forgotten.count() <= bytes.len() / 16);
        }
        Ok(FuseRequest { operation: FuseOperation::Lookup(name), .. }) => {
            assert_eq!(name.to_bytes_with_nul(), &bytes[40..]);
        }
        Ok(_) => assert!(bytes.len() >= 40),
        Err(error) => assert_eq!(error.unique().is_some(), bytes.len() >= 40),
    }
}

/// Decodes the head of a hot pack: an accepted one must be the same after encoding, and have the length that its
/// beginning states.
pub fn hot_pack(bytes: &[u8]) {
    use image::lazy::hot::HotHead;
    if let Ok(head) = HotHead::decode(bytes) {
        assert_eq!(head.encode().as_deref(), Ok(bytes));
        let length = bytes.first_chunk().map(HotHead::length_of);
        assert_eq!(length, Some(Ok(bytes.len())));
    }
}

/// Decodes the traces of an image: accepted ones must be the same after encoding and decoding.
pub fn traces(bytes: &[u8]) {
    if let Ok(traces) = store::Traces::decode(bytes) {
        assert_eq!(store::Traces::decode(&traces.encode()).ok(), Some(traces));
    }
}

/// Parses the documents of an artifact that makes an image lazy: accepted ones must be consistent.
pub fn lazy_artifact(bytes: &[u8]) {
    transfer::lazy::artifact::exercise(bytes);
}

/// Reads the recipe of a layer in such an artifact. The first byte selects the objects that are in the store; each
/// missing object is fetched once.
pub fn lazy_recipe(bytes: &[u8]) {
    transfer::lazy::update::exercise(bytes);
}

/// Reads the image of a foreign index over the devices that it names: an accepted one is what Quire's writer would
/// write.
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
            kind: image::lazy::BlobKind::Gzip,
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

/// Inflates a gzip blob: the output must be that of another decoder, and each span on its own must give the same
/// bytes.
pub fn gzip_span(bytes: &[u8]) {
    use flate2::bufread::MultiGzDecoder;
    use image::gzip::{Checkpoint, Indexer};
    use std::io::Read as _;
    /// Limit of the output in bytes. More would only be slow.
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
        // A checkpoint that does not fit the bytes gives any bytes or an error.
        let wrong = Checkpoint { window: checkpoints[0].window.clone(), ..one.clone() };
        let _any = wrong.inflate(&span[span.len() / 2..], length);
    }
}

/// Decompresses a zstd blob, as another decoder does. Returns whether it has spans, and each span on its own gives the
/// same bytes. They may differ if a reference is longer than the window of its frame, which no encoder makes.
#[must_use]
pub fn zstd_span(bytes: &[u8]) -> bool {
    use image::digest::Digest;
    use image::gzip::Window;
    use image::lazy::{BlobKind, Head, SpanPlace};
    use image::verity::DeviceId;
    use std::io::Read as _;
    use transfer::lazy::{FrameIndexer, inflate_span};
    /// Limit of the output in bytes. More would only be slow.
    const MAX: u64 = 8 << 20;
    /// Largest window, as a power of 2, the same as that of the indexer.
    const WINDOW_LOG: u32 = 27;
    let source = std::io::BufReader::with_capacity(1000, bytes);
    let mut indexer = FrameIndexer::new(source).expect("there is memory for a decoder");
    let mut ours = Vec::new();
    let read = (&mut indexer).take(MAX).read_to_end(&mut ours);
    let source = std::io::BufReader::with_capacity(1000, bytes);
    let mut decoder = zstd::Decoder::with_buffer(source).expect("there is memory for a decoder");
    decoder.window_log_max(WINDOW_LOG).expect("it is a valid limit");
    let mut theirs = Vec::new();
    let other = decoder.take(MAX).read_to_end(&mut theirs);
    assert_eq!(read.is_ok(), other.is_ok(), "{read:?} {other:?}");
    if read.is_err() {
        return false;
    }
    assert!(ours == theirs, "two decoders give other bytes");
    let Ok(found) = indexer.finish() else { return false };
    let tar_bytes = ours.len() as u64;
    if tar_bytes == MAX {
        return false;
    }
    let places = found.checkpoints.iter().map(|it| SpanPlace {
        start: it.start,
        packed: it.packed,
        unpacked: it.unpacked,
        padding: 0,
    });
    let mut head = Head {
        device: DeviceId::from_bytes(&[0; 32]).expect("it is a digest"),
        device_bytes: tar_bytes,
        blob: Digest::sha256(bytes),
        blob_bytes: bytes.len() as u64,
        kind: BlobKind::Zstd { data_end: found.data_end },
        diff_id: Digest::sha256(b""),
        tar_bytes,
        tail: Vec::new(),
        units: Vec::new(),
        spans: places.collect(),
        groups: Vec::new(),
    };
    let mut all = Vec::new();
    for number in 0..head.spans.len() {
        let place = |it: u64| usize::try_from(it).expect("it is in memory");
        let packed = head.packed(&(number..number + 1));
        let span = &bytes[place(packed.start)..place(packed.end)];
        all.extend(inflate_span(&head, number, Window::default(), span).unwrap_or_default());
        // A span that does not fit the bytes gives any bytes or an error.
        let _any = inflate_span(&head, number, Window::default(), &span[span.len() / 2..]);
        head.tar_bytes -= 1;
        let _any = inflate_span(&head, number, Window::default(), span);
        head.tar_bytes += 1;
    }
    !all.is_empty() && all == ours
}

/// Reads a layer's tar: its events must suffice to rebuild the same tar.
pub fn tar_layer(bytes: &[u8]) {
    image::tar::exercise(bytes);
}
