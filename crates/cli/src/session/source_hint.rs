//! Hints for a source whose kind is unknown.

use std::ffi::OsStr;
use std::io::Read as _;
use std::path::Path;

use image::erofs::layout::{SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET};

use crate::session::resolve::may_be_pulled;

/// Prefixes of sources.
const KINDS: [&str; 7] = ["oci", "docker-archive", "tar", "dir", "dump", "erofs", "disk"];

/// Sources of skopeo and podman that Quire lacks, with alternatives.
const SOURCES: [(&str, &str); 5] = [
    ("docker://", "`quire pull` fetches images from registries"),
    ("docker-daemon:", "use `docker save NAME | quire import docker-archive:-`"),
    ("containers-storage:", "use `podman save NAME | quire import docker-archive:-`"),
    ("squashfs:", "mount it with `mount -o ro,loop FILE DIRECTORY`, and import dir:DIRECTORY"),
    ("oci-archive:", "unpack it with `tar -x -C DIR`, and import oci:DIR"),
];

/// Returns a hint for a source whose kind is unknown, based on the file of this name.
pub(crate) fn source_hint(text: &OsStr) -> Option<String> {
    let (path, shown) = (Path::new(text), text.display());
    if text == "-" {
        return Some("did you mean tar:- for standard input?".to_owned());
    }
    if path.join("oci-layout").is_file() {
        return Some(format!("did you mean oci:{shown}?"));
    }
    if path.is_dir() {
        return Some(format!("did you mean dir:{shown}?"));
    }
    if path.extension().is_some_and(|it| it == "dump") {
        return Some(format!("did you mean dump:{shown}?"));
    }
    if let Some(kind) = erofs_kind(path) {
        return Some(format!("did you mean {kind}:{shown}?"));
    }
    if path.exists() {
        return Some(format!(
            "did you mean tar:{shown}, or docker-archive:{shown} for an archive of `docker save`?"
        ));
    }
    let text = text.to_str()?;
    if let Some((_, advice)) = SOURCES.iter().find(|(kind, _)| text.starts_with(kind)) {
        return Some((*advice).to_owned());
    }
    let typed = text.split_once(':').filter(|it| !it.0.contains('/'));
    if let Some((word, rest)) = typed {
        let kinds = KINDS.iter().filter(|kind| store::mistyped(word, kind) == Some(1));
        if let Some(kind) = kinds.min_by_key(|kind| kind.len().abs_diff(word.len())) {
            // `bar:1` may also be an image.
            let image = match may_be_pulled(text) && !Path::new(rest).exists() {
                true => format!(", or `quire pull {text}`"),
                false => String::new(),
            };
            return Some(format!("did you mean {kind}:{rest}{image}?"));
        }
    }
    if may_be_pulled(text) {
        return Some(format!("`quire pull {text}` fetches it from a registry"));
    }
    typed.is_none().then(|| format!("the file {shown} does not exist"))
}

/// Returns `erofs` or `disk`, if the file begins like one.
fn erofs_kind(path: &Path) -> Option<&'static str> {
    let (len, begin) = (SUPERBLOCK_OFFSET + 4, 512);
    let bytes = read_start(path, len)?;
    if bytes.get(SUPERBLOCK_OFFSET..) == Some(&SUPERBLOCK_MAGIC.to_le_bytes()) {
        return Some("erofs");
    }
    bytes.get(begin..)?.starts_with(b"EFI PART").then_some("disk")
}

fn read_start(path: &Path, len: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = oci::files::regular_or_block(path).ok()?;
    file.take(len as u64).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}
