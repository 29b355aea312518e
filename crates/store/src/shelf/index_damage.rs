//! Damage of indexes.

use std::io;

/// Why an index is not usable. Its file is damaged, or was not written by this program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IndexDamage {
    #[error("it is missing")]
    Absent,
    #[error("it is not a regular file")]
    NotAFile,
    #[error("it is too short")]
    Short,
    #[error("it has too many objects")]
    TooManyObjects,
    #[error("it is not an index of this format")]
    Format,
    #[error("its checksum is wrong")]
    Checksum,
    /// The number of the kind.
    #[error("it is of an unknown kind, {0}")]
    Kind(u32),
    /// The block size in bytes.
    #[error("its block size is {0}, not 512")]
    BlockSize(u32),
    /// Length of the layer's digest in bytes.
    #[error("its layer is invalid: a digest of {0} bytes")]
    Layer(u32),
    #[error("its header is invalid")]
    Header,
    #[error("the length of its device, {0} bytes, is not in whole blocks")]
    DeviceLength(u64),
    #[error("its lengths do not add up")]
    Lengths,
    #[error("its entries are not in order")]
    Order,
    #[error("an object has two SHA-256 digests")]
    Digests,
    #[error("an empty object has an offset: {0}")]
    EmptyAt(u64),
    #[error("an object at byte {0} does not begin at a block boundary")]
    Start(u64),
    #[error("an object of {size} bytes at byte {offset} is not within the device")]
    Outside { offset: u64, size: u64 },
    /// Offsets of the objects in the device.
    #[error("the objects at bytes {0} and {1} overlap")]
    Overlap(u64, u64),
    #[error("a tar has objects in pieces")]
    PiecesOfTar,
    /// Size of the object in bytes.
    #[error("the pieces of an object of {0} bytes do not add up to its size")]
    PieceSum(u64),
    /// Length of the piece in bytes.
    #[error("a piece of {0} bytes does not end at a block boundary")]
    PieceEnd(u64),
    #[error("two pieces of zeros stand side by side")]
    ZerosTwice,
    #[error("the reserved field of an object in pieces is {0}, not zero")]
    Reserved(u64),
    #[error("the pieces of objects are not in order: {actual} follows where {expected} should")]
    PieceOrder { expected: u64, actual: u64 },
    #[error("it has fewer pieces than its objects")]
    FewPieces,
    /// Length in bytes of the pieces without an object.
    #[error("it has more pieces than its objects, by {0} bytes")]
    ManyPieces(usize),
    #[error("its objects in pieces are not in order")]
    RecordOrder,
    #[error("two objects have the same pieces")]
    SamePieces,
}

/// Why an index was not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IndexError {
    /// The caller, which knows the name of the file, reports the source.
    #[error("cannot read an index")]
    Read(#[source] io::Error),
    #[error(transparent)]
    Damaged(#[from] IndexDamage),
}
