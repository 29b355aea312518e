//! Finds the programs that connect containers.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::NetworksError;

/// The programs that connect containers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetavarkPrograms {
    pub netavark: PathBuf,
    /// `None` if it is not installed.
    pub aardvark: Option<PathBuf>,
}

/// Directories of podman's helper programs. Source: containers.conf(5), `helper_binaries_dir`.
const HELPERS: [&str; 7] = [
    "/usr/local/libexec/podman",
    "/usr/local/lib/podman",
    "/usr/libexec/podman",
    "/usr/lib/podman",
    "/usr/bin",
    "/usr/sbin",
    "/usr/local/bin",
];

/// Directories of the programs that netavark calls.
pub(super) const SYSTEM: [&str; 6] =
    ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Finds the programs.
///
/// # Errors
/// [`NetworksError::NoNetavark`].
pub fn find_programs() -> Result<NetavarkPrograms, NetworksError> {
    let find = |name| HELPERS.iter().map(|it| Path::new(it).join(name)).find(|it| it.is_file());
    let netavark = find("netavark").ok_or(NetworksError::NoNetavark)?;
    Ok(NetavarkPrograms { netavark, aardvark: find("aardvark-dns") })
}
