//! Makes gzip layers of directories with GNU tar, so that Quire reads the output of another program.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::layout;

/// Precision of modification times in the tar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mtime {
    /// Whole seconds, as tools that make images write them.
    WholeSeconds,
    /// With the fraction, in a PAX record.
    Exact,
}

/// A layer's file, with its properties for a manifest.
pub struct LayerFile {
    pub file: PathBuf,
    /// SHA-256 of the file in lower-case hex.
    pub digest: String,
    /// SHA-256 of the uncompressed tar in lower-case hex.
    pub diff_id: String,
    /// Media type in the manifest: one of those in `layout`.
    pub media: &'static str,
}

const FILE: &str = "layer.tar.gz";
const FACTS: &str = "layer.json";

impl LayerFile {
    /// Opens a layer that `write` has written into `dir`.
    pub fn open(dir: &Path) -> Result<Self> {
        let facts: Value = serde_json::from_slice(&fs::read(dir.join(FACTS))?)?;
        let text =
            |key: &str| facts[key].as_str().map(String::from).context("layer.json is damaged");
        let (digest, diff_id) = (text("digest")?, text("diff_id")?);
        Ok(Self { file: dir.join(FILE), digest, diff_id, media: layout::GZIP })
    }
}

pub fn write(root: &Path, dir: &Path, mtime: Mtime) -> Result<LayerFile> {
    let mut tar = Command::new("tar");
    tar.args(["--create", "--file=-", "--format=pax", "--numeric-owner", "--sort=name"]);
    tar.args(["--xattrs", "--xattrs-include=*", "--xattrs-exclude=trusted.overlay.*"]);
    tar.arg(match mtime {
        Mtime::WholeSeconds => "--pax-option=delete=atime,delete=ctime,delete=mtime",
        Mtime::Exact => "--pax-option=delete=atime,delete=ctime",
    });
    tar.arg("--directory").arg(root).arg(".").stdout(Stdio::piped());
    let mut tar = tar.spawn().context("cannot start tar")?;
    let mut from = tar.stdout.take().expect("stdout is piped");
    let mut diff_id = Sha256::new();
    let mut to = GzEncoder::new(Hashed::create(&dir.join(FILE))?, Compression::default());
    let mut buffer = vec![0; 1 << 18];
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        diff_id.update(&buffer[..read]);
        to.write_all(&buffer[..read])?;
    }
    if !tar.wait()?.success() {
        bail!("tar failed on {}", root.display());
    }
    let facts = json!({
        "digest": hex(&to.finish()?.hash.finalize()),
        "diff_id": hex(&diff_id.finalize()),
    });
    fs::write(dir.join(FACTS), facts.to_string())?;
    LayerFile::open(dir)
}

/// A writer that hashes the bytes of a file.
struct Hashed {
    file: File,
    hash: Sha256,
}

impl Hashed {
    fn create(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::create(path)?, hash: Sha256::new() })
    }
}

impl io::Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Converts overlayfs's deletions below `dir` to OCI's: a 0:0 character device `NAME` becomes an empty `.wh.NAME`,
/// and an opaque directory gets a file `.wh..wh..opq`.
pub fn overlay_to_oci(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let (path, found) = (entry.path(), entry.metadata()?);
        if found.file_type().is_char_device() && found.rdev() == 0 {
            let mut name = std::ffi::OsString::from(".wh.");
            name.push(entry.file_name());
            fs::remove_file(&path)?;
            File::create(dir.join(name))?;
        } else if found.is_dir() {
            let mut value = [0; 1];
            let opaque = rustix::fs::lgetxattr(&path, "trusted.overlay.opaque", &mut value);
            if opaque == Ok(1) && value == *b"y" {
                File::create(path.join(".wh..wh..opq"))?;
            }
            overlay_to_oci(&path)?;
        }
    }
    Ok(())
}
