//! Makes eStargz and zstd:chunked layers of tars, by their specifications: stargz-snapshotter's `docs/estargz.md`, and
//! containers/storage's `pkg/chunked`. It shares no code with Quire.

use std::collections::BTreeMap;
use std::io::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// The format of a layer with a table of contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkedFormat {
    Estargz,
    ZstdChunked,
}

/// A layer, and the annotations that a manifest has for it.
#[derive(Debug, Clone)]
pub struct ChunkedLayer {
    pub blob: Vec<u8>,
    /// The uncompressed tar. That of eStargz ends with the table.
    pub tar: Vec<u8>,
    pub media_type: &'static str,
    pub annotations: Value,
}

/// An image of such layers.
#[derive(Debug, Clone)]
pub struct ChunkedImage {
    pub manifest: Vec<u8>,
    pub config: Vec<u8>,
}

/// Returns the OCI digest of some bytes.
pub fn sha256(bytes: &[u8]) -> String {
    let hex: String = Sha256::digest(bytes).iter().map(|it| format!("{it:02x}")).collect();
    format!("sha256:{hex}")
}

impl ChunkedFormat {
    fn packed(self, bytes: &[u8]) -> Vec<u8> {
        match self {
            Self::Estargz => {
                let level = flate2::Compression::new(1);
                let mut member = flate2::write::GzEncoder::new(Vec::new(), level);
                member.write_all(bytes).unwrap();
                member.finish().unwrap()
            }
            Self::ZstdChunked => zstd::encode_all(bytes, 1).unwrap(),
        }
    }
}

/// The blob and the tar that are being made.
struct Out {
    format: ChunkedFormat,
    blob: Vec<u8>,
    tar: Vec<u8>,
    pending: Vec<u8>,
}

impl Out {
    /// Ends the current member or frame.
    fn flush(&mut self) {
        let packed = self.format.packed(&self.pending);
        self.blob.extend(packed);
        self.tar.append(&mut self.pending);
    }
}

/// Makes a layer of a ustar or pax tar with chunks of this length in bytes. `lie` changes the table.
pub fn chunked_layer(
    tar: &[u8],
    format: ChunkedFormat,
    chunk: usize,
    lie: impl Fn(&mut Value),
) -> ChunkedLayer {
    let mut out = Out { format, blob: Vec::new(), tar: Vec::new(), pending: Vec::new() };
    let mut entries = Vec::new();
    let mut rest = tar;
    while let Some((start, entry, content)) = next(&mut rest) {
        out.pending.extend_from_slice(start);
        if content.is_empty() {
            entries.push(entry);
            continue;
        }
        let (at, name) = (entries.len(), entry["name"].clone());
        let mut first = entry;
        first["digest"] = sha256(content).into();
        for (number, bytes) in content.chunks(chunk).enumerate() {
            if format == ChunkedFormat::Estargz || number == 0 {
                out.flush();
            }
            let mut entry = match number {
                0 => first.clone(),
                _ => json!({ "name": name, "type": "chunk", "chunkOffset": number * chunk }),
            };
            entry["offset"] = out.blob.len().into();
            if content.len() > chunk || format == ChunkedFormat::Estargz {
                entry["chunkDigest"] = sha256(bytes).into();
            }
            // eStargz omits the length of a file's last chunk.
            let is_last = (number + 1) * chunk >= content.len();
            if content.len() > chunk && (format == ChunkedFormat::ZstdChunked || !is_last) {
                entry["chunkSize"] = bytes.len().into();
            }
            entries.push(entry);
            out.pending.extend_from_slice(bytes);
            if format == ChunkedFormat::ZstdChunked {
                out.flush();
            }
        }
        if format == ChunkedFormat::ZstdChunked {
            entries[at]["endOffset"] = out.blob.len().into();
        }
        let padding = content.len().next_multiple_of(512) - content.len();
        out.pending.resize(out.pending.len() + padding, 0);
    }
    let mut table = json!({ "version": 1, "entries": entries });
    lie(&mut table);
    let json = table.to_string().into_bytes();
    match format {
        ChunkedFormat::Estargz => estargz(out, &json),
        ChunkedFormat::ZstdChunked => zstd_chunked(out, &json),
    }
}

fn estargz(mut out: Out, json: &[u8]) -> ChunkedLayer {
    out.flush();
    let offset = out.blob.len();
    out.pending.extend(header("stargz.index.json", json.len()));
    out.pending.extend(json);
    out.pending.resize(json.len().next_multiple_of(512) + 512 + 1024, 0);
    out.flush();
    out.blob.extend(b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x1a\0SG\x16\0");
    out.blob.extend(format!("{offset:016x}STARGZ").as_bytes());
    out.blob.extend(b"\x01\0\0\xff\xff\0\0\0\0\0\0\0\0");
    ChunkedLayer {
        blob: out.blob,
        tar: out.tar,
        media_type: "application/vnd.oci.image.layer.v1.tar+gzip",
        annotations: json!({ "containerd.io/snapshot/stargz/toc.digest": sha256(json) }),
    }
}

fn zstd_chunked(mut out: Out, json: &[u8]) -> ChunkedLayer {
    out.pending.resize(out.pending.len() + 1024, 0);
    out.flush();
    let table = out.format.packed(json);
    let position = format!("{}:{}:{}:1", out.blob.len() + 8, table.len(), json.len());
    for bytes in [&table[..], &[0; 64]] {
        // A skippable frame. Source: RFC 8878, 3.1.2.
        out.blob.extend(b"\x50\x2a\x4d\x18");
        out.blob.extend(u32::try_from(bytes.len()).unwrap().to_le_bytes());
        out.blob.extend(bytes);
    }
    ChunkedLayer {
        blob: out.blob,
        tar: out.tar,
        media_type: "application/vnd.oci.image.layer.v1.tar+zstd",
        annotations: json!({
            "io.github.containers.zstd-chunked.manifest-checksum": sha256(&table),
            "io.github.containers.zstd-chunked.manifest-position": position,
        }),
    }
}

/// Makes the manifest and the config of an image. `command` is its entrypoint.
pub fn chunked_image(layers: &[&ChunkedLayer], command: &[&str]) -> ChunkedImage {
    let diff_ids: Vec<_> = layers.iter().map(|it| sha256(&it.tar)).collect();
    let config = json!({
        "os": "linux", "architecture": "amd64", "config": { "Entrypoint": command },
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    let config = config.to_string().into_bytes();
    let layers: Vec<_> = layers
        .iter()
        .map(|it| {
            json!({
                "mediaType": it.media_type, "digest": sha256(&it.blob), "size": it.blob.len(),
                "annotations": it.annotations,
            })
        })
        .collect();
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": sha256(&config), "size": config.len(),
        },
        "layers": layers,
    });
    ChunkedImage { manifest: manifest.to_string().into_bytes(), config }
}

/// Returns a ustar header of a file.
fn header(name: &str, size: usize) -> [u8; 512] {
    let mut header = [0; 512];
    header[..name.len()].copy_from_slice(name.as_bytes());
    let fields = [(100, 7, 0o444), (108, 7, 0), (116, 7, 0), (124, 11, size), (136, 11, 0)];
    for (at, width, value) in fields {
        header[at..at + width].copy_from_slice(format!("{value:0width$o}").as_bytes());
    }
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar\x0000");
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().copied().map(u32::from).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    header
}

/// Returns the bytes before an entry's content, the entry as in a table, and its content. Drops them from `rest`.
fn next<'t>(rest: &mut &'t [u8]) -> Option<(&'t [u8], Value, &'t [u8])> {
    let all = *rest;
    let mut records = BTreeMap::new();
    loop {
        let block = rest.first_chunk::<512>().filter(|it| it.iter().any(|byte| *byte != 0))?;
        let text = |at: usize, length: usize| {
            let field = block[at..at + length].split(|it| *it == 0).next().unwrap();
            String::from_utf8(field.to_vec()).unwrap()
        };
        let octal = |at: usize, length: usize| {
            let text = text(at, length);
            match text.trim() {
                "" => 0,
                digits => i64::from_str_radix(digits, 8).unwrap(),
            }
        };
        let size =
            records.get("size").map_or_else(|| octal(124, 12), |it: &String| it.parse().unwrap());
        let size = usize::try_from(size).unwrap();
        let kind = block[156];
        let has_content = matches!(kind, 0 | b'0' | b'x' | b'g');
        let length = if has_content { size } else { 0 };
        let content = &rest[512..512 + length];
        let start = &all[..all.len() - rest.len() + 512];
        *rest = &rest[512 + length.next_multiple_of(512)..];
        if kind == b'x' || kind == b'g' {
            records.extend(pax(content));
            continue;
        }
        let record = |name: &str, other: String| records.get(name).cloned().unwrap_or(other);
        let prefix = match text(345, 155) {
            prefix if prefix.is_empty() => prefix,
            prefix => format!("{prefix}/"),
        };
        let id = |name: &str, at| record(name, octal(at, 8).to_string()).parse::<i64>().unwrap();
        let mut entry = json!({
            "name": record("path", format!("{prefix}{}", text(0, 100))),
            "type": match kind {
                0 | b'0' => "reg",
                b'1' => "hardlink",
                b'2' => "symlink",
                b'3' => "char",
                b'4' => "block",
                b'5' => "dir",
                b'6' => "fifo",
                other => panic!("type {other}"),
            },
            "mode": octal(100, 8),
            "uid": id("uid", 108),
            "gid": id("gid", 116),
            "modtime": time(&record("mtime", octal(136, 12).to_string())),
        });
        if length > 0 {
            entry["size"] = length.into();
        }
        let target = record("linkpath", text(157, 100));
        if matches!(kind, b'1' | b'2') {
            entry["linkName"] = target.into();
        }
        if matches!(kind, b'3' | b'4') {
            entry["devMajor"] = octal(329, 8).into();
            entry["devMinor"] = octal(337, 8).into();
        }
        for (name, value) in &records {
            if let Some(name) = name.strip_prefix("SCHILY.xattr.") {
                entry["xattrs"][name] = STANDARD.encode(value).into();
            }
        }
        return Some((start, entry, content));
    }
}

/// Parses the records of an extended header. Source: POSIX `pax`, "pax Extended Header".
fn pax(mut records: &[u8]) -> Vec<(String, String)> {
    let mut all = Vec::new();
    while !records.is_empty() {
        let space = records.iter().position(|it| *it == b' ').unwrap();
        let length = std::str::from_utf8(&records[..space]).unwrap().parse().unwrap();
        let record = std::str::from_utf8(&records[space + 1..length - 1]).unwrap();
        let (name, value) = record.split_once('=').unwrap();
        all.push((name.to_owned(), value.to_owned()));
        records = &records[length..];
    }
    all
}

/// Formats a number of seconds since 1970, which is not negative, in the format of RFC 3339. Source: Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`.
fn time(seconds: &str) -> String {
    let (seconds, fraction) = seconds.split_once('.').unwrap_or((seconds, ""));
    let seconds: u64 = seconds.parse().unwrap();
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let fraction = match fraction.trim_end_matches('0') {
        "" => String::new(),
        digits => format!(".{digits}"),
    };
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}Z")
}
