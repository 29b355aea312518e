//! Compresses a layer's tar.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use store::VerifiedBytes;

use super::gzip::gzip;
use super::{ExportError, Options};
use image::digest::{Digest, DigestHasher};

/// The level of `zstd` itself.
const ZSTD_LEVEL: i32 = 3;
/// Bytes that are read at once.
const PIECE: usize = 256 << 10;

/// How a layer is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Encoding {
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
}

/// A layer that was compressed, in a file without a name.
#[derive(Debug, Clone)]
pub(super) struct Compressed {
    pub(super) file: Arc<File>,
    pub(super) digest: Digest,
    /// Bytes.
    pub(super) size: u64,
}

/// Which side of a copy has failed.
pub(super) enum CopyError {
    Read(io::Error),
    Write(io::Error),
    Cancelled,
}

/// Copies to the end.
pub(super) fn copy(
    from: &mut dyn Read,
    into: &mut dyn Write,
    options: &Options<'_>,
    tell: &dyn Fn(u64),
) -> Result<(), CopyError> {
    let mut buffer = vec![0; PIECE];
    loop {
        if options.cancel.load(Ordering::Relaxed) {
            return Err(CopyError::Cancelled);
        }
        let read = match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(CopyError::Read(error)),
        };
        into.write_all(&buffer[..read]).map_err(CopyError::Write)?;
        tell(read as u64);
    }
}

/// What is written, hashed and counted.
struct Hashed {
    file: BufWriter<File>,
    hasher: DigestHasher,
    size: u64,
}

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Compresses a tar. The same bytes come of the same tar, as long as it is the same version of this program on the same
/// kind of processor.
pub(super) fn compress(
    mut tar: VerifiedBytes<'_>,
    diff_id: &Digest,
    encoding: Encoding,
    options: &Options<'_>,
    tell: &dyn Fn(u64),
) -> Result<Compressed, ExportError> {
    let scratch: &Path = options.scratch;
    let failed = |source| ExportError::Scratch { directory: scratch.to_owned(), source };
    let copied = |result| match result {
        Ok(()) => Ok(()),
        Err(CopyError::Read(error)) => Err(ExportError::layer(*diff_id, error)),
        Err(CopyError::Write(error)) => Err(failed(error)),
        Err(CopyError::Cancelled) => Err(ExportError::Cancelled),
    };
    let file = tempfile::tempfile_in(scratch).map_err(failed)?;
    let file = BufWriter::with_capacity(PIECE, file);
    let mut out = Hashed { file, hasher: DigestHasher::sha256(), size: 0 };
    let Hashed { file, hasher, size } = match encoding {
        Encoding::Gzip => {
            let size = tar.size();
            copied(gzip(&mut tar, size, &mut out, options, tell))?;
            out
        }
        Encoding::Zstd => {
            let mut encoder = zstd::Encoder::new(out, ZSTD_LEVEL).map_err(failed)?;
            encoder.set_pledged_src_size(Some(tar.size())).map_err(failed)?;
            copied(copy(&mut tar, &mut encoder, options, tell))?;
            encoder.finish().map_err(failed)?
        }
    };
    let file = file.into_inner().map_err(|error| failed(error.into_error()))?;
    Ok(Compressed { file: Arc::new(file), digest: hasher.finish(), size })
}
