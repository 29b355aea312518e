//! The compression settings of an image, after its superblock.

use std::fmt;

use zerocopy::FromBytes as _;
use zerocopy::little_endian::U16;

use super::super::error::{ErofsCorruption, Part, ReadError, Unsupported};
use super::super::inode::Nid;
use super::super::source::ReadAt;
use super::super::superblock::Superblock;
use super::super::{ByteOffset, Image};
use super::Method;
use crate::erofs::layout::{
    LZMA_WINDOW_MAX, RawDeflateConfig, RawLzmaConfig, RawZstdConfig, incompat,
};

/// An algorithm by which files are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// LZ4 blocks.
    Lz4,
    /// MicroLZMA: raw LZMA data whose first byte, always 0, is replaced by the inverted properties.
    MicroLzma,
    /// Deflate data without a header.
    Deflate,
    /// Zstandard frames.
    Zstd,
}

impl Algorithm {
    /// All algorithms, by their numbers. Source: `Z_EROFS_COMPRESSION_*` in Linux `fs/erofs/erofs_fs.h`.
    const ALL: [Self; 4] = [Self::Lz4, Self::MicroLzma, Self::Deflate, Self::Zstd];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::MicroLzma => "MicroLZMA",
            Self::Deflate => "deflate",
            Self::Zstd => "zstd",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Superblock {
    /// Returns the algorithms that the image states. Images without settings state none, but may use LZ4.
    pub fn algorithms(&self) -> impl Iterator<Item = Algorithm> + use<> {
        let has_settings = self.incompat & incompat::COMPR_CFGS != 0;
        let bits = if has_settings { self.algorithm_bits } else { 0 };
        Algorithm::ALL
            .into_iter()
            .zip(0..)
            .filter(move |(_, at)| bits >> at & 1 != 0)
            .map(|it| it.0)
    }
}

/// The checked settings of an image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    /// A bit for each algorithm by its number: whether files may use it.
    available: u16,
    /// Whether LZ4 data has its padding before it.
    pub(super) has_padding_first: bool,
}

impl Settings {
    /// Returns settings with which files may use all algorithms.
    #[cfg(test)]
    pub(super) const fn of_all(has_padding_first: bool) -> Self {
        Self { available: 15, has_padding_first }
    }

    /// Returns how clusters are compressed that state an algorithm's number.
    pub(super) fn method(self, nid: Nid, number: u8) -> Result<Method, ReadError> {
        let algorithm = Algorithm::ALL.get(usize::from(number)).copied();
        let algorithm = algorithm.ok_or(Unsupported::Algorithm(nid, number))?;
        match self.available >> number & 1 {
            0 => Err(ErofsCorruption::Algorithm { nid, algorithm }.into()),
            _ => Ok(Method::Packed(algorithm)),
        }
    }
}

impl<S: ReadAt> Image<S> {
    /// Reads and checks the compression settings.
    ///
    /// Files are unpacked into memory for all of their bytes, so the settings' windows are not needed. They are
    /// checked because the kernel checks them.
    pub(super) fn settings(&self) -> Result<Settings, ReadError> {
        let has = |bit: u32| self.superblock.incompat & bit != 0;
        let has_padding_first = has(incompat::ZERO_PADDING);
        if !has(incompat::COMPR_CFGS) {
            return Ok(Settings { available: 1, has_padding_first });
        }
        let available = self.superblock.algorithm_bits;
        if available >> Algorithm::ALL.len() != 0 {
            return Err(Unsupported::Algorithms(available).into());
        }
        let mut at = self.superblock.settings.0;
        for algorithm in self.superblock.algorithms() {
            at = at.checked_next_multiple_of(4).unwrap_or(u64::MAX);
            let len: U16 = self.fetch_raw(ByteOffset(at), Part::Settings)?;
            let len = match len.get() {
                0 => 1 << 16,
                len => u64::from(len),
            };
            at = at.saturating_add(2);
            self.check_settings(algorithm, at, len)?;
            at = at.saturating_add(len);
        }
        Ok(Settings { available, has_padding_first })
    }

    fn check_settings(&self, algorithm: Algorithm, at: u64, len: u64) -> Result<(), ReadError> {
        let mut bytes = [0; 14];
        let need = match algorithm {
            Algorithm::Lz4 | Algorithm::MicroLzma => 14,
            Algorithm::Deflate | Algorithm::Zstd => 6,
        };
        let wrong = |value: u32| ErofsCorruption::Settings { algorithm, value };
        let bytes = bytes.get_mut(..need).unwrap_or_default();
        if len < super::to_u64(need) {
            return Err(wrong(u32::try_from(len).unwrap_or(u32::MAX)).into());
        }
        self.fetch(ByteOffset(at), bytes, Part::Settings)?;
        let (format, value, is_right) = match algorithm {
            Algorithm::Lz4 => (0, 0, true),
            Algorithm::MicroLzma => {
                let (raw, _) = RawLzmaConfig::ref_from_prefix(bytes).expect("it has 14 bytes");
                let window = raw.dict_size.get();
                (raw.format.get(), window, (4096..=LZMA_WINDOW_MAX).contains(&window))
            }
            Algorithm::Deflate => {
                let (raw, _) = RawDeflateConfig::ref_from_prefix(bytes).expect("it has 6 bytes");
                (0, raw.windowbits.into(), (8..=15).contains(&raw.windowbits))
            }
            Algorithm::Zstd => {
                let (raw, _) = RawZstdConfig::ref_from_prefix(bytes).expect("it has 6 bytes");
                (raw.format.into(), raw.windowlog.into(), raw.windowlog <= 10)
            }
        };
        if format != 0 {
            return Err(Unsupported::AlgorithmFormat(algorithm, format).into());
        }
        if is_right { Ok(()) } else { Err(wrong(value).into()) }
    }
}
