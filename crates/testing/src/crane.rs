//! Where go-containerregistry's `crane` is: a client of registries, and by `crane registry serve` a registry in memory.

use std::path::PathBuf;

/// A program that `cargo xtask inputs INPUT` has built: the newest of those whose folder in the cache begins with `folder`.
/// Says so if there is none.
#[expect(clippy::disallowed_methods, reason = "tests are told by the environment where tools are")]
pub fn built(folder: &str, program: &str, input: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("QUIRE_CACHE").map(PathBuf::from);
    let entries = cache.and_then(|it| it.read_dir().ok()).into_iter().flatten().flatten();
    let named = entries.filter(|it| it.file_name().to_string_lossy().starts_with(folder));
    let programs = named.map(|it| it.path().join("bin").join(program)).filter(|it| it.is_file());
    let found = programs.max_by_key(|it| it.metadata().and_then(|it| it.modified()).ok());
    if found.is_none() {
        crate::skipped(&format!(
            "{program} is not there (`cargo xtask inputs {input}`), or QUIRE_CACHE is not set"
        ));
    }
    found
}

/// On `PATH`, or where `cargo xtask inputs crane` has built it. Says so if it is in neither.
#[expect(clippy::disallowed_methods, reason = "tests are told by the environment where tools are")]
pub fn crane() -> Option<PathBuf> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&search).map(|folder| folder.join("crane"));
    let cache = std::env::var_os("QUIRE_CACHE").map(PathBuf::from);
    let built = cache.iter().map(|folder| folder.join("crane/bin/crane"));
    let found = on_path.chain(built).find(|it| it.is_file());
    if found.is_none() {
        crate::skipped("crane is not there, or QUIRE_CACHE is not set");
    }
    found
}
