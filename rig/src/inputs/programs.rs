//! Makes images with one common program each, for the bench of lazy starts.

use std::path::PathBuf;

use anyhow::Result;

use super::{layer, layout, rootfs};
use crate::cache::Cache;

/// Name of each image in the cache, and the packages of its upper layer.
pub const PROGRAMS: [(&str, &[&str]); 4] = [
    ("debian-numpy", &["python3-numpy"]),
    ("debian-node", &["nodejs"]),
    ("debian-jvm", &["default-jre-headless"]),
    ("debian-nginx", &["nginx"]),
];

/// Makes an OCI layout with the tag `latest`: Debian's minimal system, and a layer with one of [`PROGRAMS`].
pub fn make(cache: &Cache, name: &str, packages: &[&str], refresh: bool) -> Result<PathBuf> {
    let change = rootfs::Change { packages, script: "", xattrs: &[] };
    let base = rootfs::base(cache, false)?;
    cache.entry(name, refresh, |draft| {
        let top = rootfs::change(&base, &change, draft, layer::Mtime::WholeSeconds)?;
        let mut config = layout::Config::default();
        config.command(&["bash"]).env("LC_ALL", "C.UTF-8");
        layout::write(draft, &config, &[base.layer()?, top])
    })
}
