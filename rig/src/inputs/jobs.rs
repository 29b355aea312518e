//! Makes an image with jobs for the bench of writable layers, and with their expected results.

use std::path::PathBuf;

use anyhow::Result;

use super::{layer, layout, rootfs};
use crate::cache::Cache;

/// Makes an OCI layout with the tag `latest`: Debian's minimal system, and a layer with a compiler, git and `/srv`.
/// Its `run JOB` exits with 0 if the job gave the same result as when the image was made.
pub fn make(cache: &Cache, refresh: bool) -> Result<PathBuf> {
    let script = format!(
        "cat > /srv/stress.c <<'END_OF_C'\n{}\nEND_OF_C\n{}",
        include_str!("jobs/stress.c"),
        include_str!("jobs/image.sh")
    );
    let packages = &["gcc", "make", "libc6-dev", "git", "perl", "sqlite3"];
    let change = rootfs::Change { packages, script: &script, xattrs: &[] };
    let base = rootfs::base(cache, false)?;
    cache.entry("debian-jobs", refresh, |draft| {
        let top = rootfs::change(&base, &change, draft, layer::Mtime::WholeSeconds)?;
        let mut config = layout::Config::default();
        config.command(&["bash"]).env("LC_ALL", "C.UTF-8");
        layout::write(draft, &config, &[base.layer()?, top])
    })
}
