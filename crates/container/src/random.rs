//! Random names.

use rustix::rand::{GetRandomFlags, getrandom};
use store::OperationError;

/// Returns a random name for a volume, in the form of podman's names.
pub fn random_volume_name() -> Result<String, OperationError> {
    random_digits::<32>()
}

/// Returns a random id of twelve hexadecimal digits, which is unique with very high probability.
pub fn random_id() -> Result<String, OperationError> {
    random_digits::<6>()
}

/// Returns random hexadecimal digits, two for each byte.
fn random_digits<const N: usize>() -> Result<String, OperationError> {
    let mut bytes = [0_u8; N];
    let taken = getrandom(&mut bytes, GetRandomFlags::empty());
    let taken = taken.map_err(OperationError::of("get", "random numbers"))?;
    // getrandom(2) never returns fewer bytes than requested for up to 256 bytes.
    debug_assert_eq!(taken, bytes.len());
    Ok(bytes.iter().fold(String::new(), |id, byte| format!("{id}{byte:02x}")))
}
