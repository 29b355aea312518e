//! Files with a user's settings.

use std::ffi::OsString;
use std::path::PathBuf;

use kernel::process::Who;

/// Returns the path of the user's file of this name. Source: XDG Base Directory Specification 0.8, which says that
/// relative values must be ignored.
pub(crate) fn user_config(who: Who, name: &str) -> Option<PathBuf> {
    let absolute = |it: OsString| Some(PathBuf::from(it)).filter(|it| it.is_absolute());
    let config = std::env::var_os("XDG_CONFIG_HOME").and_then(absolute);
    // In a user namespace, the environment is still that of the user on the host.
    let home = || Some(crate::session::context::home(who)?.join(".config"));
    Some(config.or_else(home)?.join("quire").join(name))
}
