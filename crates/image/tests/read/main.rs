//! The EROFS reader: images laid out by hand, hostile ones, those of `mkfs.erofs` against the kernel, and composefs's.

#![expect(unreachable_pub, reason = "a test program")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    clippy::unwrap_used,
    reason = "tests fail by panicking"
)]

#[path = "read/blobs.rs"]
mod blobs;
#[path = "read/composefs.rs"]
mod composefs;
#[path = "read/given.rs"]
mod given;
#[path = "read/hostile.rs"]
mod hostile;
#[path = "read/laid_out.rs"]
mod laid_out;
#[path = "read/mkfs.rs"]
mod mkfs;
#[path = "read/native.rs"]
mod native;
#[path = "read/others.rs"]
mod others;
#[path = "read/patched.rs"]
mod patched;
#[path = "read/pieces.rs"]
mod pieces;
#[path = "read/read_back.rs"]
mod read_back;
#[path = "read/small.rs"]
mod small;
#[path = "read/source.rs"]
mod source;
#[path = "read/standalone.rs"]
mod standalone;
#[path = "read/tools.rs"]
mod tools;
#[path = "read/wide.rs"]
mod wide;
