//! Indexes with an entry for each logical cluster of a file.
//!
//! An extent begins in a logical cluster, its *head*, and ends where the next one begins. Each logical cluster is a
//! head, or states the distance to one before it. Source: `fs/erofs/zmap.c` of Linux, which defines the meaning of the
//! compact form.

use super::super::error::{ErofsCorruption, ReadError, Unsupported};
use super::super::inode::Nid;
use super::super::source::ReadAt;
use super::super::{ByteOffset, Image, to_u64};
use super::settings::Settings;
use super::{Head, Method, PackedExtent, PhysicalCluster, block_start, fetch_index};
use crate::erofs::layout::{
    CLUSTER_BLOCKS, CLUSTER_PARTIAL_REF, FULL_INDEX_GAP, RawClusterIndex, UNPACKED_MAX, advise,
    cluster_type, incompat,
};

/// An index of logical clusters.
#[derive(Debug)]
pub(super) struct Clusters {
    nid: Nid,
    /// Size of the file in bytes.
    size: u64,
    /// Binary logarithm of the size of a logical cluster, which is a block.
    bits: u32,
    form: Form,
    /// Whether physical clusters may have several blocks: compressed ones of the first type; those of the second type
    /// and uncompressed ones.
    may_be_big: [bool; 2],
    is_interlaced: bool,
    /// Numbers of the algorithms of the two types.
    algorithms: [u8; 2],
    /// Size in bytes of the physical cluster after the index, which is the last extent's.
    inline: Option<u64>,
    settings: Settings,
}

/// The form of an index. Offsets are those of the first entry.
#[derive(Debug, Clone, Copy)]
enum Form {
    /// [`RawClusterIndex`]es.
    Full(u64),
    /// Packs of 2 entries in 8 bytes, then packs of 16 entries in 32 bytes, then again packs of 2 entries.
    Compact {
        at: u64,
        /// Number of entries before those of the large packs.
        before: u64,
        /// Number of entries in large packs.
        large: u64,
    },
}

/// An entry of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cluster {
    /// An extent begins in the cluster.
    Head {
        kind: Kind,
        /// Offset in the cluster in bytes, less than its size.
        offset: u64,
        /// First block of the physical cluster.
        block: u64,
        is_partial: bool,
    },
    /// No extent begins in the cluster.
    Inside {
        /// Distance to the head, or to a cluster that is nearer to it; at least 1.
        back: u64,
        /// Number of blocks of the physical cluster, in the first cluster after the head.
        blocks: Option<u64>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    First,
    Second,
}

impl Clusters {
    pub(super) fn new<S: ReadAt>(
        image: &Image<S>,
        head: Head,
        is_full: bool,
    ) -> Result<Self, ReadError> {
        let Head { nid, size, raw, end, settings } = head;
        let flags = raw.h_advise.get();
        let has = |bit: u16| flags & bit != 0;
        let bits = u32::from(image.superblock.block_bits.get());
        let may_be_big = [has(advise::BIG_PCLUSTER_1), has(advise::BIG_PCLUSTER_2)];
        let more = raw.h_clusterbits & 15;
        let compact_bits = if has(advise::COMPACTED_2B) { 12 } else { 14 };
        if more != 0 || !is_full && bits > compact_bits {
            return Err(Unsupported::ClusterSize(nid, bits.saturating_add(more.into())).into());
        }
        let may_image = image.superblock.incompat & incompat::COMPR_CFGS != 0;
        let is_mixed = !is_full && may_be_big[0] != may_be_big[1];
        if may_be_big.contains(&true) && !may_image || is_mixed {
            return Err(ErofsCorruption::MapHeader { nid, flags }.into());
        }
        let form = match is_full {
            true => Form::Full(end.saturating_add(FULL_INDEX_GAP)),
            false => {
                // The header is at a multiple of 8 bytes, and large packs are at multiples of 32.
                let before = (32_u64.wrapping_sub(end % 32) % 32) / 4;
                let rest = size.div_ceil(1 << bits).saturating_sub(before);
                let large = if has(advise::COMPACTED_2B) { rest & !15 } else { 0 };
                Form::Compact { at: end, before, large }
            }
        };
        let inline = u64::from(raw.h_idata_size.get());
        Ok(Self {
            nid,
            size,
            bits,
            form,
            may_be_big,
            is_interlaced: has(advise::INTERLACED_PCLUSTER),
            algorithms: [raw.h_algorithmtype & 15, raw.h_algorithmtype >> 4],
            inline: (has(advise::INLINE_PCLUSTER) && inline != 0).then_some(inline),
            settings,
        })
    }

    /// Returns the offset in the file at which a logical cluster begins.
    const fn start(&self, number: u64) -> u64 {
        number.saturating_mul(1 << self.bits)
    }

    /// Returns the extent that contains a byte of the file.
    pub(super) fn extent<S: ReadAt>(
        &self,
        image: &Image<S>,
        offset: u64,
    ) -> Result<PackedExtent, ReadError> {
        let nid = self.nid;
        let from = offset >> self.bits;
        let farthest = from.saturating_sub(UNPACKED_MAX >> self.bits);
        let mut number = from;
        let (kind, start, block, is_partial) = loop {
            let back = match self.cluster(image, number)? {
                Cluster::Head { kind, offset: within, block, is_partial } => {
                    let start = self.start(number).saturating_add(within);
                    if start <= offset {
                        break (kind, start, block, is_partial);
                    }
                    1
                }
                Cluster::Inside { back, .. } => back,
            };
            let before = number.checked_sub(back).filter(|before| *before >= farthest && back > 0);
            let cluster = number;
            number = before.ok_or(ErofsCorruption::ClusterBack { nid, cluster, back })?;
        };
        let (end, blocks) = self.end(image, number)?;
        // The distances may have skipped a head, so that another extent contains the byte.
        let len = end.saturating_sub(start);
        let extent = |cluster| PackedExtent { start, len, cluster: Some(cluster) };
        let method = match kind {
            Kind::Plain if self.is_interlaced => Method::Interlaced,
            Kind::Plain => Method::Shifted,
            Kind::First => self.settings.method(nid, self.algorithms[0])?,
            Kind::Second => self.settings.method(nid, self.algorithms[1])?,
        };
        let cluster = match self.inline.filter(|_| end >= self.size) {
            Some(len) => {
                let at = ByteOffset(self.after(self.size.saturating_sub(1) >> self.bits));
                let within = image.superblock.block_bits.within(at);
                if within.saturating_add(len) > image.superblock.block_bits.size() {
                    return Err(ErofsCorruption::InlineData { nid, offset: at, len }.into());
                }
                PhysicalCluster { at, len, method, is_partial }
            }
            None => {
                let [first, others] = self.may_be_big;
                let may_be_big = if kind == Kind::First { first } else { others };
                let blocks = if may_be_big { blocks } else { Some(1) };
                let cluster = number.saturating_add(1);
                let blocks = blocks.ok_or(ErofsCorruption::ClusterBlocks { nid, cluster })?;
                let len = blocks.saturating_mul(1 << self.bits);
                PhysicalCluster { at: block_start(image, block), len, method, is_partial }
            }
        };
        Ok(extent(cluster).check(nid)?)
    }

    /// Returns the end of the extent with this head, and the number of blocks of its physical cluster if it may have
    /// several: `None` if the index does not state it.
    fn end<S: ReadAt>(&self, image: &Image<S>, head: u64) -> Result<(u64, Option<u64>), ReadError> {
        let mut blocks = Some(1);
        let most = (UNPACKED_MAX >> self.bits).saturating_add(1);
        for after in 1..=most {
            let number = head.saturating_add(after);
            if self.start(number) >= self.size {
                return Ok((self.size, blocks));
            }
            match self.cluster(image, number)? {
                Cluster::Head { offset, .. } => {
                    let end = self.start(number).saturating_add(offset);
                    return Ok((end.min(self.size), blocks));
                }
                Cluster::Inside { back, blocks: stated } if after == 1 => {
                    blocks = stated.filter(|_| back == 1);
                }
                Cluster::Inside { .. } => {}
            }
        }
        // The check of the extent's length refuses it.
        Ok((self.start(head.saturating_add(most).saturating_add(1)), blocks))
    }

    /// Returns the offset after the entry of a logical cluster, or after its pack.
    fn after(&self, number: u64) -> u64 {
        match self.form {
            Form::Full(at) => at.saturating_add(number.saturating_add(1).saturating_mul(8)),
            Form::Compact { .. } => {
                let place = self.place(number);
                place.at.saturating_add(to_u64(place.len))
            }
        }
    }

    fn cluster<S: ReadAt>(&self, image: &Image<S>, number: u64) -> Result<Cluster, ReadError> {
        match self.form {
            Form::Full(at) => self.full(image, at.saturating_add(number.saturating_mul(8)), number),
            Form::Compact { .. } => self.compact(image, number),
        }
    }

    fn full<S: ReadAt>(
        &self,
        image: &Image<S>,
        at: u64,
        number: u64,
    ) -> Result<Cluster, ReadError> {
        let mut raw: RawClusterIndex = zerocopy::FromZeros::new_zeroed();
        fetch_index(image, self.nid, at, zerocopy::IntoBytes::as_mut_bytes(&mut raw))?;
        let flags = raw.di_advise.get();
        let [kind, _] = (flags & 3).to_le_bytes();
        let Some(kind) = Kind::of_cluster(kind) else {
            let [low, high, ..] = raw.di_u.get().to_le_bytes();
            return self.inside(number, u16::from_le_bytes([low, high]));
        };
        let (block, is_partial) = (raw.di_u.get().into(), flags & CLUSTER_PARTIAL_REF != 0);
        self.head(number, kind, raw.di_clusterofs.get(), block, is_partial)
    }

    fn head(
        &self,
        number: u64,
        kind: Kind,
        offset: u16,
        block: u64,
        is_partial: bool,
    ) -> Result<Cluster, ReadError> {
        let (nid, offset) = (self.nid, u64::from(offset));
        if offset >> self.bits != 0 {
            return Err(ErofsCorruption::ClusterOffset { nid, cluster: number, offset }.into());
        }
        Ok(Cluster::Head { kind, offset, block, is_partial })
    }

    /// Returns a cluster in which no extent begins, from the distance to the head with [`CLUSTER_BLOCKS`].
    fn inside(&self, number: u64, distance: u16) -> Result<Cluster, ReadError> {
        if distance & CLUSTER_BLOCKS == 0 {
            return Ok(Cluster::Inside { back: distance.into(), blocks: None });
        }
        if !self.may_be_big.contains(&true) {
            return Err(ErofsCorruption::ClusterBlocks { nid: self.nid, cluster: number }.into());
        }
        let blocks = u64::from(distance & !CLUSTER_BLOCKS);
        Ok(Cluster::Inside { back: 1, blocks: Some(blocks).filter(|blocks| *blocks != 0) })
    }

    fn place(&self, number: u64) -> PackPlace {
        let Form::Compact { at, before, large } = self.form else { return PackPlace::default() };
        let small = |at: u64, number: u64| PackPlace {
            at: at.saturating_add((number / 2).saturating_mul(8)),
            len: 8,
            count: 2,
            index: usize::from(!number.is_multiple_of(2)),
        };
        let Some(number) = number.checked_sub(before) else { return small(at, number) };
        let at = at.saturating_add(before.saturating_mul(4));
        match number.checked_sub(large) {
            Some(number) => small(at.saturating_add(large.saturating_mul(2)), number),
            None => PackPlace {
                at: at.saturating_add((number / 16).saturating_mul(32)),
                len: 32,
                count: 16,
                index: super::to_usize(number % 16),
            },
        }
    }

    fn compact<S: ReadAt>(&self, image: &Image<S>, number: u64) -> Result<Cluster, ReadError> {
        let PackPlace { at, len, count, index } = self.place(number);
        let mut bytes = [0; 32];
        let bytes = bytes.get_mut(..len).unwrap_or_default();
        fetch_index(image, self.nid, at, bytes)?;
        let pack = Pack { bytes, count, low: self.bits.max(12) };
        let (low, kind) = pack.entry(index);
        let Some(kind) = Kind::of_cluster(kind) else {
            let is_last = index.saturating_add(1) == count;
            if low & CLUSTER_BLOCKS != 0 || !is_last {
                return self.inside(number, low);
            }
            // The last entry of a pack has the distance to the next head instead.
            let back = match pack.entry(index.saturating_sub(1)) {
                (_, kind) if Kind::of_cluster(kind).is_some() => 1,
                (low, _) if low & CLUSTER_BLOCKS != 0 => 2,
                (low, _) => u64::from(low).saturating_add(1),
            };
            return Ok(Cluster::Inside { back, blocks: None });
        };
        let nid = self.nid;
        let blocks = match self.may_be_big[0] {
            true => pack.blocks_before(index),
            false => Some(pack.heads_before(index)),
        };
        let blocks = blocks.ok_or(ErofsCorruption::ClusterBlocks { nid, cluster: number })?;
        self.head(number, kind, low, pack.base().saturating_add(blocks), false)
    }
}

impl Kind {
    /// Returns the kind of extent that begins in a cluster of this type; `None` if no extent does.
    const fn of_cluster(cluster: u8) -> Option<Self> {
        match cluster {
            cluster_type::PLAIN => Some(Self::Plain),
            cluster_type::HEAD1 => Some(Self::First),
            cluster_type::HEAD2 => Some(Self::Second),
            _ => None,
        }
    }
}

/// The pack that contains the entry of a logical cluster.
#[derive(Debug, Clone, Copy, Default)]
struct PackPlace {
    at: u64,
    /// Length of the pack in bytes.
    len: usize,
    /// Number of its entries.
    count: usize,
    /// Index of the entry.
    index: usize,
}

/// A pack: entries of 14 or 16 bits, lowest bits first, then a block number of 4 bytes.
#[derive(Debug)]
struct Pack<'a> {
    bytes: &'a [u8],
    /// Number of entries.
    count: usize,
    /// Number of bits before the 2 bits of the cluster's type.
    low: u32,
}

impl Pack<'_> {
    /// Returns an entry's low bits and type.
    fn entry(&self, index: usize) -> (u16, u8) {
        let width = if self.count == 2 { 16 } else { 14 };
        let bit = index.saturating_mul(width);
        let bytes = self.bytes.get(bit / 8..).and_then(|rest| rest.first_chunk());
        let value = u32::from_le_bytes(*bytes.expect("4 bytes follow all entries"));
        let value = value.wrapping_shr(u32::try_from(bit % 8).expect("less than 8"));
        let [low, high, ..] = (value & 1_u32.wrapping_shl(self.low).wrapping_sub(1)).to_le_bytes();
        let [kind, ..] = (value.wrapping_shr(self.low) & 3).to_le_bytes();
        (u16::from_le_bytes([low, high]), kind)
    }

    /// Returns the block number at the end.
    fn base(&self) -> u64 {
        let bytes = self.bytes.last_chunk().expect("a pack has at least 8 bytes");
        u32::from_le_bytes(*bytes).into()
    }

    /// Returns the number of physical clusters up to that of a head, if all have one block.
    fn heads_before(&self, index: usize) -> u64 {
        let (mut at, mut heads) = (index, 1_u64);
        while let Some(before) = at.checked_sub(1) {
            let (low, kind) = self.entry(before);
            // The distance leads to the head, which may be before the pack.
            let back = if Kind::of_cluster(kind).is_some() { 0 } else { usize::from(low) };
            let Some(head) = before.checked_sub(back) else { break };
            heads = heads.saturating_add(1);
            at = head;
        }
        heads
    }

    /// Returns the number of blocks of the physical clusters before that of a head; `None` if the entries are wrong.
    fn blocks_before(&self, index: usize) -> Option<u64> {
        let (mut at, mut blocks) = (index, 0_u64);
        while let Some(before) = at.checked_sub(1) {
            let (low, kind) = self.entry(before);
            at = match Kind::of_cluster(kind) {
                Some(_) => {
                    blocks = blocks.saturating_add(1);
                    before
                }
                None if low & CLUSTER_BLOCKS != 0 => {
                    blocks = blocks.saturating_add((low & !CLUSTER_BLOCKS).into());
                    // The head is the entry before.
                    before.saturating_sub(1)
                }
                // The distance leads to the head, and the entry after the head has the number of blocks.
                None => {
                    let back = usize::from(low).checked_sub(2)?;
                    before.saturating_sub(back)
                }
            };
        }
        Some(blocks)
    }
}
