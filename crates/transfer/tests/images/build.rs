//! Builds sources for tests: tars, layouts and archives.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use serde_json::{Value, json};
use store::Digest;

/// A tar with old-style headers, so that the tests do not depend on another writer.
#[derive(Debug, Default, Clone)]
pub(crate) struct Tar(Vec<u8>);

impl Tar {
    /// Makes a tar of the entries in `text`, which are separated by commas: `d PATH`, `f PATH CONTENT`, `l PATH
    /// TARGET` (hard link), `s PATH TARGET`, `w PATH` (whiteout).
    pub(crate) fn from_text(text: &str) -> Self {
        let mut tar = Self::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let words: Vec<_> = entry.split(' ').collect();
            let third = words.get(2).copied().unwrap_or_default();
            match words[0] {
                "d" => tar.entry(words[1], b'5', "", b""),
                "f" => tar.entry(words[1], b'0', "", third.as_bytes()),
                "l" => tar.entry(words[1], b'1', third, b""),
                "s" => tar.entry(words[1], b'2', third, b""),
                "w" => tar.entry(words[1], b'0', "", b""),
                other => panic!("{other}"),
            };
        }
        tar
    }

    pub(crate) fn file(mut self, path: &str, content: &[u8]) -> Self {
        self.entry(path, b'0', "", content);
        self
    }

    pub(crate) fn entry(
        &mut self,
        path: &str,
        kind: u8,
        target: &str,
        content: &[u8],
    ) -> &mut Self {
        self.header(path, kind, target, content.len() as u64);
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    /// Adds a file that can be executed.
    pub(crate) fn program(mut self, path: &str, content: &[u8]) -> Self {
        self.header_with_mode(path, b'0', "", content.len() as u64, 0o755);
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub(crate) fn header(&mut self, path: &str, kind: u8, target: &str, size: u64) -> &mut Self {
        let mode = if kind == b'5' { 0o755 } else { 0o644 };
        self.header_with_mode(path, kind, target, size, mode)
    }

    fn header_with_mode(
        &mut self,
        path: &str,
        kind: u8,
        target: &str,
        size: u64,
        mode: u64,
    ) -> &mut Self {
        let mut header = [0; 512];
        header[..path.len()].copy_from_slice(path.as_bytes());
        for (at, width, value) in [
            (100, 7, mode),
            (108, 7, 1000),
            (116, 7, 100),
            (124, 11, size),
            (136, 11, 1_500_000_000),
        ] {
            header[at..at + width].copy_from_slice(format!("{value:0width$o}").as_bytes());
        }
        header[156] = kind;
        header[157..157 + target.len()].copy_from_slice(target.as_bytes());
        header[257..265].copy_from_slice(b"ustar\x0000");
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().copied().map(u32::from).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&header);
        self
    }

    /// Adds an extended header for the next entry. Source: POSIX `pax`, "pax Extended Header".
    pub(crate) fn pax(&mut self, records: &[(&str, &str)]) -> &mut Self {
        let mut text = String::new();
        for (key, value) in records {
            let rest = format!(" {key}={value}\n");
            // The length includes its own digits.
            let length = (1..=3).map(|digits| rest.len() + digits);
            let length = length.clone().find(|it| it.to_string().len() + rest.len() == *it);
            text.push_str(&format!("{}{rest}", length.unwrap()));
        }
        self.entry("pax", b'x', "", text.as_bytes())
    }

    /// Returns the tar with its end marker.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.0.clone();
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    }
}

/// Compression of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pack {
    Plain,
    Gzip,
    /// Two members.
    Gzips,
    Zstd,
}

pub(crate) fn pack(bytes: &[u8], pack: Pack) -> Vec<u8> {
    let gzip = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    match pack {
        Pack::Plain => bytes.to_vec(),
        Pack::Gzip => gzip(bytes),
        Pack::Gzips => [gzip(&bytes[..bytes.len() / 2]), gzip(&bytes[bytes.len() / 2..])].concat(),
        Pack::Zstd => zstd::encode_all(bytes, 1).unwrap(),
    }
}

/// An OCI layout being built.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    pub(crate) directory: &'a Path,
    manifests: Vec<Value>,
}

impl<'a> Layout<'a> {
    pub(crate) fn new(directory: &'a Path) -> Self {
        fs::create_dir_all(directory.join("blobs/sha256")).unwrap();
        fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        Self { directory, manifests: Vec::new() }
    }

    pub(crate) fn blob_path(&self, digest: &Digest) -> std::path::PathBuf {
        self.directory.join("blobs").join(digest.to_string().replace(':', "/"))
    }

    pub(crate) fn blob(&self, bytes: &[u8]) -> Digest {
        let digest = Digest::sha256(bytes);
        fs::write(self.blob_path(&digest), bytes).unwrap();
        digest
    }

    pub(crate) fn descriptor(&self, media_type: &str, bytes: &[u8]) -> Value {
        let digest = self.blob(bytes).to_string();
        json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() })
    }

    /// Adds an image of these tars. Returns its descriptor, and the digests of its layers' blobs.
    pub(crate) fn image(&self, tars: &[(Vec<u8>, Pack)]) -> (Value, Vec<Digest>) {
        let diff_ids: Vec<_> =
            tars.iter().map(|(tar, _)| Digest::sha256(tar).to_string()).collect();
        let config = json!({
            "architecture": "amd64", "os": "linux",
            "config": { "Cmd": ["/bin/true"], "Env": ["A=b c"] },
            "rootfs": { "type": "layers", "diff_ids": diff_ids },
        });
        self.image_with(tars, &config)
    }

    pub(crate) fn image_with(
        &self,
        tars: &[(Vec<u8>, Pack)],
        config: &Value,
    ) -> (Value, Vec<Digest>) {
        let config = config.to_string();
        let config = self.descriptor("application/vnd.oci.image.config.v1+json", config.as_bytes());
        let mut blobs = Vec::new();
        let layers: Vec<_> = tars
            .iter()
            .map(|(tar, how)| {
                let blob = pack(tar, *how);
                blobs.push(Digest::sha256(&blob));
                // The media type may differ from the actual compression.
                self.descriptor("application/vnd.oci.image.layer.v1.tar+gzip", &blob)
            })
            .collect();
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({
            "schemaVersion": 2, "mediaType": manifest_type, "config": config, "layers": layers,
        });
        (self.descriptor(manifest_type, manifest.to_string().as_bytes()), blobs)
    }

    pub(crate) fn add(
        &mut self,
        mut descriptor: Value,
        name: Option<&str>,
        platform: Option<&str>,
    ) {
        if let Some(name) = name {
            descriptor["annotations"] = json!({ "org.opencontainers.image.ref.name": name });
        }
        if let Some(platform) = platform {
            let (os, architecture) = platform.split_once('/').unwrap();
            descriptor["platform"] = json!({ "os": os, "architecture": architecture });
        }
        self.manifests.push(descriptor);
        let index = json!({ "schemaVersion": 2, "manifests": self.manifests });
        fs::write(self.directory.join("index.json"), index.to_string()).unwrap();
    }
}

/// Makes an archive like `docker save`.
pub(crate) fn docker_archive(tars: &[Vec<u8>], tags: &[&str], age: Age) -> Vec<u8> {
    let diff_ids: Vec<_> = tars.iter().map(|tar| Digest::sha256(tar).to_string()).collect();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    let config = config.to_string();
    let hex = Digest::sha256(config.as_bytes()).to_string().replace("sha256:", "");
    let mut archive = Tar::default();
    let mut layers: Vec<String> = Vec::new();
    let config_name = match age {
        Age::Old => format!("{hex}.json"),
        Age::New => format!("blobs/sha256/{hex}"),
    };
    archive.entry(&config_name, b'0', "", config.as_bytes());
    for (at, tar) in tars.iter().enumerate() {
        let before = tars[..at].iter().position(|other| other == tar);
        let path = match age {
            Age::Old => format!("layer{at}/layer.tar"),
            Age::New => diff_ids[at].replace("sha256:", "blobs/sha256/"),
        };
        match before {
            None => archive.entry(&path, b'0', "", tar),
            Some(before) if age == Age::Old => {
                archive.entry(&path, b'2', &format!("../layer{before}/layer.tar"), b"")
            }
            Some(_) => &mut archive,
        };
        layers.push(path);
    }
    let manifest = json!([{ "Config": config_name, "RepoTags": tags, "Layers": layers }]);
    archive.entry("manifest.json", b'0', "", manifest.to_string().as_bytes());
    archive.bytes()
}

/// The version of Docker that wrote an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Age {
    /// Before Docker 25.
    Old,
    /// An archive that is also a layout.
    New,
}
