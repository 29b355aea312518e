//! An entry of a table of contents.

use std::collections::BTreeMap;

use serde::Deserialize;

/// One entry. The fields of the tar header are part of the key of the gap that contains the header.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct TocEntry {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) name: String,
    pub(super) link_name: String,
    pub(super) mode: i64,
    pub(super) size: u64,
    pub(super) uid: i64,
    pub(super) gid: i64,
    pub(super) user_name: String,
    pub(super) group_name: String,
    pub(super) modtime: String,
    pub(super) accesstime: String,
    pub(super) changetime: String,
    pub(super) dev_major: i64,
    pub(super) dev_minor: i64,
    pub(super) xattrs: BTreeMap<String, String>,
    pub(super) digest: String,
    pub(super) offset: u64,
    pub(super) end_offset: u64,
    pub(super) chunk_size: u64,
    pub(super) chunk_offset: u64,
    pub(super) chunk_digest: String,
    pub(super) inner_offset: u64,
}
