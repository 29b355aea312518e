//! The parameters of the layout.
//!
//! All profiles have one layout engine in three steps: a survey lists the inodes with their xattrs
//! ([`Survey`](super::survey::Survey)), the [plan](super::plan) assigns a position to each part, and the
//! [stream](super::stream) writes the parts from first to last. The profiles differ in the following, which
//! `docs/format/erofs-profile.md` specifies:
//!
//! | | composefs | standalone and native | where |
//! |---|---|---|---|
//! | block size | 4096 | 4096, native 512 | [`Rules::block_size`] |
//! | longest tail of a directory | half a block | 83 % of a block | [`Rules::tail_max`] |
//! | tails of files | as long | as long, none for DAX and gVisor | [`Rules::file_tails`] |
//! | positions of inodes | in order, by the rules of C | small inodes fill gaps | [`Rules::packing`] |
//! | order of blocks | that of inodes | names and targets, then files | [`Rules::blocks`] |
//! | numbers of inodes | from 0 | from 1 | [`Rules::first_ino`] |
//! | checksum | none | crc32c | [`Rules::checksum`] |
//! | order of inodes | breadth first | depth first, the inodes of a directory together | survey |
//! | time of compact inodes | earliest | most frequent | survey |
//! | inodes and xattrs | changed for overlayfs | those of the tree | survey |
//! | external files | a table of holes | blocks and a tail, or a table of chunks on devices | survey |
//! | device table, long prefixes, fingerprints | none | native | survey |
//!
//! The two surveys are separate, because the rows that end with *survey* determine the meaning of an image and not the
//! positions of its parts; they share only the code that makes xattr sets. Everything else is the same for all
//! profiles: forms of inodes, the cutting of directories, the table of shared xattrs, the superblock, and the order of
//! the regions.

use super::blocks::BlockSize;
use super::output::Checksum;
use super::pack::Packing;

/// Parameters of the layout that depend on the profile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) block_size: BlockSize,
    /// Maximum length in bytes of the tail of a directory or a file, which is stored after the inode. A longer one
    /// takes a block.
    pub(super) tail_max: u64,
    /// Whether files have tails. If not, all data of files is in blocks, so that it can be mapped.
    pub(super) file_tails: bool,
    pub(super) packing: Packing,
    pub(super) blocks: BlockOrder,
    /// Number of the first inode for 32-bit `stat`.
    pub(super) first_ino: u32,
    pub(super) checksum: Checksum,
}

impl Rules {
    /// The rules of C composefs.
    pub(super) const COMPOSEFS: Self = Self {
        block_size: BlockSize::B4096,
        tail_max: 2048,
        file_tails: true,
        packing: Packing::InOrder,
        blocks: BlockOrder::Inodes,
        first_ino: 0,
        checksum: Checksum::None,
    };

    /// Rules for images that are mounted without overlayfs. A higher maximum wastes more space before the ends of
    /// blocks than it saves: 3400 of 4096 bytes give the smallest images of Debian, or images within 0.003 % of the
    /// smallest. A lower maximum makes images larger and listings faster, because listings read the blocks with
    /// inodes: `docs/format/erofs-profile.md` has the numbers.
    pub(super) const STANDALONE: Self = Self {
        tail_max: 3400,
        packing: Packing::FillGaps,
        blocks: BlockOrder::NamesFirst,
        first_ino: 1,
        checksum: Checksum::Crc32c,
        ..Self::COMPOSEFS
    };

    /// Rules for readers that cannot map files whose data is not in blocks: gVisor, and Linux with DAX, for which a block
    /// must be a page.
    pub(super) const MAPPED: Self = Self { file_tails: false, ..Self::STANDALONE };

    /// Rules for images over devices: the maximum length of tails is the same part of a block as in self-contained
    /// images.
    pub(super) const NATIVE: Self = Self {
        block_size: BlockSize::B512,
        tail_max: Self::STANDALONE.tail_max * BlockSize::B512.bytes() / BlockSize::B4096.bytes(),
        ..Self::STANDALONE
    };
}

/// The order in which data gets blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockOrder {
    /// The order of the inodes.
    Inodes,
    /// First directories and symlinks, so that metadata is contiguous, then files; each in the order of the inodes.
    NamesFirst,
}

impl BlockOrder {
    /// Returns the passes over the inodes.
    pub(super) const fn passes(self) -> &'static [BlockPass] {
        match self {
            Self::Inodes => &[BlockPass::All],
            Self::NamesFirst => &[BlockPass::Names, BlockPass::Files],
        }
    }
}

/// The data that gets blocks in a pass over the inodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockPass {
    All,
    /// Directories and symlinks.
    Names,
    Files,
}
