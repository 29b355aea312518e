//! Makes layers of both formats, following their specifications.

use std::io::Write as _;

use serde_json::{Value, json};

use crate::chunked::toc::Format;
use image::digest::Digest;
use oci::manifest::Descriptor;

pub(super) struct MadeLayer {
    pub(super) blob: Vec<u8>,
    pub(super) tar: Vec<u8>,
    pub(super) descriptor: Descriptor,
}

impl MadeLayer {
    pub(super) fn diff_id(&self) -> Digest {
        Digest::sha256(&self.tar)
    }
}

/// Returns incompressible bytes, which are the same for the same seed.
pub(super) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

fn header(name: &[u8], kind: u8, size: usize, mtime: u64) -> [u8; 512] {
    let mut header = [0; 512];
    header[..name.len()].copy_from_slice(name);
    let mut octal = |at: usize, width: usize, value: u64| {
        let text = format!("{value:0width$o}");
        header[at..at + width].copy_from_slice(text.as_bytes());
    };
    octal(100, 7, 0o644);
    octal(108, 7, 0);
    octal(116, 7, 0);
    octal(124, 11, size as u64);
    octal(136, 11, mtime);
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar\x0000");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    header
}

fn packed(format: Format, bytes: &[u8]) -> Vec<u8> {
    match format {
        Format::Estargz => {
            let level = flate2::Compression::new(1);
            let mut member = flate2::write::GzEncoder::new(Vec::new(), level);
            member.write_all(bytes).unwrap();
            member.finish().unwrap()
        }
        Format::ZstdChunked => zstd::encode_all(bytes, 1).unwrap(),
    }
}

fn skippable(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap();
    [&b"\x50\x2a\x4d\x18"[..], &length.to_le_bytes(), bytes].concat()
}

/// Options for making a layer.
pub(super) struct Habits<'a> {
    pub(super) format: Format,
    /// Size of a chunk in bytes.
    pub(super) chunk: usize,
    /// Modification time of all files in the tar.
    pub(super) mtime: u64,
    /// Modifies the table before it is stored.
    pub(super) lie: &'a dyn Fn(&mut Value),
}

impl Habits<'static> {
    pub(super) fn for_format(format: Format) -> Self {
        Self { format, chunk: 1 << 20, mtime: 1_000_000_000, lie: &|_| () }
    }
}

/// Makes a layer of these files. A name that ends with `/` is a directory.
pub(super) fn layer(files: &[(&str, Vec<u8>)], habits: &Habits<'_>) -> MadeLayer {
    let Habits { format, chunk, mtime, lie } = *habits;
    let mut made = (Vec::new(), Vec::new());
    let (blob, tar): (&mut Vec<u8>, &mut Vec<u8>) = (&mut made.0, &mut made.1);
    let mut pending = Vec::new();
    let mut entries = Vec::new();
    let flush = |blob: &mut Vec<u8>, tar: &mut Vec<u8>, pending: &mut Vec<u8>| {
        blob.extend_from_slice(&packed(format, pending));
        tar.append(pending);
    };
    for (name, content) in files {
        let is_directory = name.ends_with('/');
        // Each character is one byte, so that a name may also begin with the magic number of a compression format.
        let raw: Vec<u8> = name.chars().map(|it| u8::try_from(u32::from(it)).unwrap()).collect();
        let kind = if is_directory { b'5' } else { b'0' };
        pending.extend_from_slice(&header(&raw, kind, content.len(), mtime));
        let mut first = json!({
            "name": name, "type": if is_directory { "dir" } else { "reg" }, "mode": 0o644,
            "modtime": "2001-09-09T01:46:40Z", "NumLink": 0,
        });
        if content.is_empty() {
            entries.push(first);
            continue;
        }
        first["size"] = content.len().into();
        first["digest"] = Digest::sha256(content).to_string().into();
        let at = entries.len();
        for (number, bytes) in content.chunks(chunk).enumerate() {
            if format == Format::Estargz || number == 0 {
                flush(blob, tar, &mut pending);
            }
            let mut entry = match number {
                0 => first.clone(),
                _ => json!({ "name": name, "type": "chunk", "chunkOffset": number * chunk }),
            };
            entry["offset"] = blob.len().into();
            if content.len() > chunk || format == Format::Estargz {
                entry["chunkDigest"] = Digest::sha256(bytes).to_string().into();
            }
            let is_last = (number + 1) * chunk >= content.len();
            // eStargz omits the size of the last chunk.
            if content.len() > chunk && (format == Format::ZstdChunked || !is_last) {
                entry["chunkSize"] = bytes.len().into();
            }
            entries.push(entry);
            pending.extend_from_slice(bytes);
            if format == Format::ZstdChunked {
                flush(blob, tar, &mut pending);
            }
        }
        if format == Format::ZstdChunked {
            entries[at]["endOffset"] = blob.len().into();
        }
        let padding = content.len().next_multiple_of(512) - content.len();
        pending.resize(pending.len() + padding, 0);
    }
    let mut table = json!({ "version": 1, "entries": entries });
    lie(&mut table);
    let json = table.to_string().into_bytes();
    let annotations = match format {
        Format::Estargz => {
            flush(blob, tar, &mut pending);
            let offset = blob.len();
            pending.extend_from_slice(&header(b"stargz.index.json", b'0', json.len(), 0));
            pending.extend_from_slice(&json);
            pending.resize(json.len().next_multiple_of(512) + 512 + 1024, 0);
            flush(blob, tar, &mut pending);
            blob.extend_from_slice(b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x1a\0SG\x16\0");
            blob.extend_from_slice(format!("{offset:016x}STARGZ").as_bytes());
            blob.extend_from_slice(b"\x01\0\0\xff\xff\0\0\0\0\0\0\0\0");
            json!({ "containerd.io/snapshot/stargz/toc.digest": Digest::sha256(&json).to_string() })
        }
        Format::ZstdChunked => {
            pending.resize(pending.len() + 1024, 0);
            flush(blob, tar, &mut pending);
            let table = packed(format, &json);
            let position = format!("{}:{}:{}:1", blob.len() + 8, table.len(), json.len());
            blob.extend_from_slice(&skippable(&table));
            blob.extend_from_slice(&skippable(&[0; 64]));
            json!({
                "io.github.containers.zstd-chunked.manifest-checksum":
                    Digest::sha256(&table).to_string(),
                "io.github.containers.zstd-chunked.manifest-position": position,
            })
        }
    };
    let descriptor = json!({
        "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
        "digest": Digest::sha256(blob).to_string(),
        "size": blob.len(),
        "annotations": annotations,
    });
    let descriptor = serde_json::from_value(descriptor).unwrap();
    MadeLayer { blob: made.0, tar: made.1, descriptor }
}
