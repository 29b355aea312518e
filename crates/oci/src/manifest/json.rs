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

type JsonFields = serde_json::Map<String, serde_json::Value>;

/// Parses a document that is an object, as [`object`] deserializes one.
pub(super) fn parse_object<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    if !bytes.trim_ascii_start().starts_with(b"{") {
        let _fields: JsonFields = serde_json::from_slice(bytes)?;
    }
    serde_json::from_slice(bytes)
}

/// Deserializes an object. Without this, serde would also take an array of the fields' values, which other readers
/// refuse.
pub(super) fn object<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: serde::de::DeserializeOwned,
{
    let fields = JsonFields::deserialize(deserializer)?;
    T::deserialize(serde_json::Value::Object(fields)).map_err(serde::de::Error::custom)
}

/// Deserializes an object, as [`object`] does, or null as the default value.
pub(super) fn object_or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + serde::de::DeserializeOwned,
{
    let Some(fields) = Option::<JsonFields>::deserialize(deserializer)? else {
        return Ok(T::default());
    };
    T::deserialize(serde_json::Value::Object(fields)).map_err(serde::de::Error::custom)
}
