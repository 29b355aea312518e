//! Images with one program that people start in containers: what the bench of lazy starts runs.

use std::path::PathBuf;

use anyhow::Result;

use super::{layer, layout, rootfs};
use crate::cache::Cache;

/// What an image is called in the cache, and the packages of its upper layer.
pub const PROGRAMS: [(&str, &[&str]); 4] = [
    ("debian-numpy", &["python3-numpy"]),
    ("debian-node", &["nodejs"]),
    ("debian-jvm", &["default-jre-headless"]),
    ("debian-nginx", &["nginx"]),
];

/// An OCI layout, tag `latest`: Debian's minimal system, then a layer with one of [`PROGRAMS`].
pub fn make(cache: &Cache, (name, packages): (&str, &[&str]), refresh: bool) -> Result<PathBuf> {
    let change = rootfs::Change { packages, script: "", xattrs: &[] };
    let base = rootfs::base(cache, false)?;
    cache.entry(name, refresh, |draft| {
        let top = rootfs::change(&base, &change, draft, layer::Mtime::WholeSeconds)?;
        let mut config = layout::Config::default();
        config.command(&["bash"]).env("LC_ALL", "C.UTF-8");
        layout::write(draft, &config, &[base.layer()?, top])
    })
}
