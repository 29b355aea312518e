//! Small files with a checksum: `meta`, refs and the records of containers.
//!
//! The first line is JSON. The second line is the SHA-256 digest of the first line, including its newline.

use serde::Serialize;
use serde::de::DeserializeOwned;

use image::digest::Digest;
use image::verity::ImageId;

/// Maximum length of a record in bytes. All records of Quire are much shorter.
pub(crate) const RECORD_MAX: u64 = 1 << 20;

/// A reason why a record cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The file is empty or contains only zeros, because it was created just before a crash and never synced.
    #[error("it is empty")]
    Unwritten,
    /// A byte differs from the written one.
    #[error("its checksum is wrong")]
    Checksum,
    /// The checksum is right, but the contents are invalid.
    #[error("its contents are invalid")]
    Json(#[source] serde_json::Error),
}

pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = serde_json::to_vec(value).expect("records have string keys and integers");
    bytes.push(b'\n');
    let check = Digest::sha256(&bytes);
    bytes.extend_from_slice(format!("{check}\n").as_bytes());
    bytes
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, RecordError> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Err(RecordError::Unwritten);
    }
    let end = bytes.iter().position(|byte| *byte == b'\n').ok_or(RecordError::Checksum)?;
    let (json, check) = bytes.split_at(end + 1);
    if check != format!("{}\n", Digest::sha256(json)).as_bytes() {
        return Err(RecordError::Checksum);
    }
    serde_json::from_slice(json).map_err(RecordError::Json)
}

/// Checks that a record which names an image belongs to this image, because a file may have been renamed.
pub(crate) fn check_image(named: &str, image: &ImageId) -> Result<(), RecordError> {
    if named == image.to_string() {
        return Ok(());
    }
    let other = format!("it names image {}", named.escape_debug());
    Err(RecordError::Json(serde::de::Error::custom(other)))
}

#[cfg(test)]
mod tests {
    use super::{RecordError, decode, encode};

    #[test]
    fn every_flipped_bit_is_found() {
        let good = encode(&["a", "b"]);
        assert_eq!(decode::<Vec<String>>(&good).unwrap(), ["a", "b"]);
        for at in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[at / 8] ^= 1 << (at % 8);
            assert!(matches!(decode::<Vec<String>>(&bad), Err(RecordError::Checksum)), "bit {at}");
        }
        for length in 1..good.len() {
            let cut = decode::<Vec<String>>(&good[..length]);
            assert!(matches!(cut, Err(RecordError::Checksum)), "{length} bytes");
        }
    }

    #[test]
    fn what_was_never_written_is_told_apart() {
        for bytes in [&b""[..], &[0; 80]] {
            assert!(matches!(decode::<Vec<String>>(bytes), Err(RecordError::Unwritten)));
        }
        assert!(matches!(decode::<u32>(&encode(&"text")), Err(RecordError::Json(_))));
    }
}
