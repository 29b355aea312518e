//! Compresses a layer's tar.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use store::VerifiedBytes;

use super::copy_error::CopyError;
use super::gzip::gzip;
use super::{ExportError, Options};
use crate::spool::Spool;
use image::digest::{Digest, DigestHasher};

/// The default level of the `zstd` program.
const ZSTD_LEVEL: i32 = 3;
/// Bytes of content per zstd frame. Parts of a layer can be read, and an index made of it, because a frame refers to
/// no data before it. Layers of Debian get 1.3 % larger than with one frame, and 2.5 % with frames of half the size.
const FRAME: u64 = 2 << 20;
/// Bytes per read.
pub(super) const PIECE: usize = 256 << 10;

/// A compression format of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Encoding {
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
}

/// A compressed layer in an unnamed file.
#[derive(Debug, Clone)]
pub(super) struct Compressed {
    pub(super) file: Arc<File>,
    pub(super) digest: Digest,
    /// Size in bytes.
    pub(super) size: u64,
}

/// A layer that was packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedLayer {
    pub diff_id: Digest,
    pub digest: Digest,
    /// Size of the blob, in bytes.
    pub size: u64,
}

/// Copies all bytes to the end, and calls `tell` with the length of each read.
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

/// A reader or writer that hashes and counts its bytes.
struct Hashed<T> {
    inner: T,
    hasher: DigestHasher,
    size: u64,
}

impl<T> Hashed<T> {
    fn new(inner: T) -> Self {
        Self { inner, hasher: DigestHasher::sha256(), size: 0 }
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.size += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(into)?;
        self.hasher.update(&into[..read]);
        self.size += read as u64;
        Ok(read)
    }
}

/// Compresses a tar while it is read; without an encoding, the blob is the tar itself. `size` is the tar's size in
/// bytes, if known. The same tar gives the same bytes with the same version of this program and on the same kind of
/// processor.
///
/// # Errors
/// A [`CopyError`]; the blob in `into` is incomplete then.
pub fn pack(
    tar: impl Read,
    size: Option<u64>,
    encoding: Option<Encoding>,
    into: impl Write,
    options: &Options<'_>,
) -> Result<PackedLayer, CopyError> {
    let mut tar = Hashed::new(tar);
    let mut out = Hashed::new(into);
    match encoding {
        None => copy(&mut tar, &mut out, options, &|_| {})?,
        Some(encoding) => out = encode(&mut tar, size, encoding, out, options, &|_| {})?,
    }
    out.flush().map_err(CopyError::Write)?;
    Ok(PackedLayer { diff_id: tar.hasher.finish(), digest: out.hasher.finish(), size: out.size })
}

fn encode<W: Write>(
    tar: &mut dyn Read,
    size: Option<u64>,
    encoding: Encoding,
    mut out: W,
    options: &Options<'_>,
    tell: &dyn Fn(u64),
) -> Result<W, CopyError> {
    match encoding {
        Encoding::Gzip => {
            gzip(tar, size, &mut out, options, tell)?;
            Ok(out)
        }
        Encoding::Zstd => {
            let mut left = size;
            loop {
                let mut part = (&mut *tar).take(FRAME);
                let mut encoder = zstd::Encoder::new(out, ZSTD_LEVEL).map_err(CopyError::Write)?;
                let expected = left.map(|it| it.min(FRAME));
                encoder.set_pledged_src_size(expected).map_err(CopyError::Write)?;
                copy(&mut part, &mut encoder, options, tell)?;
                let is_last = part.limit() > 0;
                out = encoder.finish().map_err(CopyError::Write)?;
                if is_last {
                    return Ok(out);
                }
                left = left.map(|it| it.saturating_sub(FRAME));
            }
        }
    }
}

/// Compresses a tar into an unnamed file. The same tar gives the same bytes, as with [`pack`].
pub(super) fn compress(
    mut tar: VerifiedBytes<'_>,
    diff_id: &Digest,
    encoding: Encoding,
    options: &Options<'_>,
    tell: &dyn Fn(u64),
) -> Result<Compressed, ExportError> {
    let scratch: &Path = options.scratch;
    let failed = |source| ExportError::Scratch { directory: scratch.to_owned(), source };
    let file = Spool::new(scratch).map_err(failed)?;
    let out = Hashed::new(BufWriter::with_capacity(PIECE, file));
    let size = Some(tar.size());
    let encoded = encode(&mut tar, size, encoding, out, options, tell);
    let Hashed { inner, hasher, size } = encoded.map_err(|error| match error {
        CopyError::Read(error) => ExportError::layer(*diff_id, error),
        CopyError::Write(error) => failed(error),
        CopyError::Failed(error) => error.into(),
        CopyError::Cancelled => ExportError::Cancelled,
    })?;
    let spool = inner.into_inner().map_err(|error| failed(error.into_error()))?;
    Ok(Compressed { file: Arc::new(spool.into_file()), digest: hasher.finish(), size })
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn what_is_packed_is_the_tar() {
        let content = testing::noise(3 << 20);
        let cancel = AtomicBool::new(false);
        let options = Options {
            threads: NonZeroUsize::new(2).unwrap(),
            scratch: Path::new("/"),
            progress: &|_| {},
            cancel: &cancel,
        };
        for encoding in [None, Some(Encoding::Gzip), Some(Encoding::Zstd)] {
            // An unknown size changes the zstd frame, but not its content.
            for size in [None, Some(3 << 20)] {
                let mut blob = Vec::new();
                let packed = pack(&content[..], size, encoding, &mut blob, &options).unwrap();
                assert_eq!(packed.diff_id, Digest::sha256(&content));
                assert_eq!(
                    (packed.digest, packed.size),
                    (Digest::sha256(&blob), blob.len() as u64)
                );
                let mut unpacked = Vec::new();
                match encoding {
                    None => unpacked.clone_from(&blob),
                    Some(Encoding::Gzip) => {
                        let mut decoder = flate2::read::GzDecoder::new(&blob[..]);
                        decoder.read_to_end(&mut unpacked).unwrap();
                    }
                    Some(Encoding::Zstd) => {
                        zstd::stream::copy_decode(&blob[..], &mut unpacked).unwrap();
                    }
                }
                assert!(unpacked == content, "{encoding:?}");
            }
        }
        // Parts of a zstd blob can be read.
        for (length, spans) in [(0, 0), (5 << 20, 3), (4 << 20, 2)] {
            let content = testing::noise(length);
            let mut blob = Vec::new();
            let size = Some(length as u64);
            pack(&content[..], size, Some(Encoding::Zstd), &mut blob, &options).unwrap();
            let mut indexer = crate::lazy::FrameIndexer::new(&blob[..]).unwrap();
            let mut unpacked = Vec::new();
            indexer.read_to_end(&mut unpacked).unwrap();
            assert!(unpacked == content);
            assert_eq!(indexer.finish().unwrap().checkpoints.len(), spans);
        }
        cancel.store(true, Ordering::Relaxed);
        let cancelled = pack(&content[..], None, None, Vec::new(), &options);
        assert!(matches!(cancelled, Err(CopyError::Cancelled)));
    }
}
