//! Deserialises values as the writers of documents write them.

use serde::Deserialize;

use crate::{Digest, DigestError};

/// Deserialises a value, or the default for `null`, which Docker writes for missing values.
///
/// # Errors
/// If it is neither.
pub fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

pub(super) fn text<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|error: DigestError| serde::de::Error::custom(error))
}

pub(super) fn texts<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<Digest>, D::Error> {
    let texts = Option::<Vec<String>>::deserialize(deserializer)?.unwrap_or_default();
    let digests = texts.iter().map(|text| text.parse());
    digests.collect::<Result<_, DigestError>>().map_err(serde::de::Error::custom)
}
