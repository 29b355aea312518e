//! Forms in which choices of other crates are stored in `request.json`, because those crates have no serde.

use kernel::mount::{Backing, Durability};
use serde::{Deserialize, Serialize};

/// A [`Durability`].
#[derive(Serialize, Deserialize)]
#[serde(remote = "Durability", rename_all = "kebab-case")]
pub(crate) enum StoredDurability {
    Volatile,
    Durable,
}

/// A [`Backing`].
#[derive(Serialize, Deserialize)]
#[serde(remote = "Backing", rename_all = "kebab-case")]
pub(crate) enum StoredBacking {
    File,
    Loop,
}

/// An image id, as a text or null.
pub(crate) mod image_id {
    use image::verity::ImageId;
    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    #[expect(clippy::ref_option, reason = "serde passes the field")]
    pub(crate) fn serialize<S: Serializer>(
        id: &Option<ImageId>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match id {
            Some(id) => serializer.collect_str(id),
            None => serializer.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<ImageId>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        let id =
            text.map(|text| text.parse().map_err(|_wrong| D::Error::custom("not an image id")));
        id.transpose()
    }
}
