//! Finds go-containerregistry's `crane`: a client of registries, and with `crane registry serve` a registry in
//! memory.

use std::path::PathBuf;

/// Finds the program in `PATH`, or where `cargo xtask inputs crane` has built it. Prints a message if it is in
/// neither.
#[expect(clippy::disallowed_methods, reason = "tests are told by the environment where tools are")]
pub fn crane() -> Option<PathBuf> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&search).map(|folder| folder.join("crane"));
    let cache = std::env::var_os("QUIRE_CACHE").map(PathBuf::from);
    let built = cache.iter().map(|folder| folder.join("crane/bin/crane"));
    let found = on_path.chain(built).find(|it| it.is_file());
    if found.is_none() {
        crate::not_made("crane", "crane");
    }
    found
}
