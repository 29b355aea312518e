//! Finds programs in `PATH`, or where `cargo xtask inputs` has put them: go-containerregistry's `crane`, which is a
//! client of registries and with `crane registry serve` a registry in memory, and systemd's `ukify`.

use std::path::PathBuf;

/// Finds the program in `PATH`, or where `cargo xtask inputs crane` has built it. Prints a message if it is in
/// neither.
pub fn crane() -> Option<PathBuf> {
    find("crane", "crane/bin/crane")
}

/// Finds the program in `PATH`, or where `cargo xtask inputs ukify` has unpacked it. Prints a message if it is in
/// neither. It is a script for Python with `pefile`.
pub fn ukify() -> Option<PathBuf> {
    find("ukify", "ukify/usr/bin/ukify")
}

#[expect(clippy::disallowed_methods, reason = "tests are told by the environment where tools are")]
fn find(name: &str, in_cache: &str) -> Option<PathBuf> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&search).map(|folder| folder.join(name));
    let cache = std::env::var_os("QUIRE_CACHE").map(PathBuf::from);
    let made = cache.iter().map(|folder| folder.join(in_cache));
    let found = on_path.chain(made).find(|it| it.is_file());
    if found.is_none() {
        crate::not_made(name, name);
    }
    found
}
