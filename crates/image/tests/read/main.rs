//! Tests of the EROFS reader: images that were laid out by hand, hostile images, images of `mkfs.erofs`, and composefs
//! images.

#![expect(unreachable_pub, reason = "a test program")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    clippy::unwrap_used,
    reason = "tests fail by panicking"
)]

mod composefs;
mod compressed;
mod devices;
mod given;
mod hostile;
mod laid_out;
mod mkfs;
mod native;
mod others;
mod patched;
mod pieces;
mod read_back;
mod small;
mod source;
mod standalone;
mod tools;
mod wide;
