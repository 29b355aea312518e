//! Compiles the binary of a release: static, optimized by the profile `dist`, and without paths of this machine.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};
use rig::cache::Cache;
use rig::process::{cargo, cargo_home, find_program, quiet, shown};
use rig::{Failed, Skipped, tools};

use super::{Commit, Place};
use crate::debian_compiler::{self, DebianCompiler};

/// Targets of a release.
pub(super) const TARGETS: [&str; 2] = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"];

/// Compiler flags. A static binary needs no dynamic linker and no C library of a certain version. It stays
/// position-independent, so that its addresses are random; the compact form of relocations (DT_RELR) keeps its start
/// short. Symbols are removed here, because cargo ignores `strip` of a profile for a package with an override.
const FLAGS: [&str; 3] =
    ["-Ctarget-feature=+crt-static", "-Clink-arg=-Wl,-z,pack-relative-relocs", "-Cstrip=symbols"];

/// Flags for LLD, which is rustc's linker for x86-64 only: functions with the same code become one, and strings with the
/// same end. Quire does not compare addresses of functions.
const LLD_FLAGS: [&str; 2] = ["-Clink-arg=-Wl,--icf=all", "-Clink-arg=-Wl,-O2"];

/// Maximum length of the binary, which `docs/release.md` promises: 18 MiB.
const BYTES_MAX: usize = 18 << 20;

/// Variables that would change the binary.
const CHANGE_BUILDS: [&str; 6] =
    ["CARGO_PROFILE_", "CARGO_TARGET_", "CARGO_BUILD_", "RUSTFLAGS", "CFLAGS", "RUSTC_WRAPPER"];

/// Returns the directory of the toolchain that compiles these sources.
fn sysroot(sources: &Path) -> Result<PathBuf> {
    let mut rustc = Command::new("rustc");
    let path = quiet(rustc.args(["--print", "sysroot"]).current_dir(sources))?;
    Ok(PathBuf::from(path.trim_end()))
}

/// Returns whether Rust's library for the target is installed.
pub(super) fn is_installed(target: &str, sources: &Path) -> Result<bool> {
    Ok(sysroot(sources)?.join("lib/rustlib").join(target).join("lib").is_dir())
}

/// Returns what to do about the library, as a sentence.
pub(super) fn not_installed(target: &str) -> String {
    format!("Rust's library for it is not installed; `rustup target add {target}` installs it")
}

/// Compiles the binary, and returns its path.
pub(super) fn binary(place: &Place, target: &str, commit: &Commit) -> Result<PathBuf> {
    if !is_installed(target, &place.sources)? {
        if target == debian_compiler::TARGET {
            return binary_by_debian(place, commit);
        }
        bail!(Skipped(format!("no release for {target}: {}", not_installed(target))));
    }
    let sysroot = sysroot(&place.sources)?;
    let prefixes = prefixes(place, &sysroot)?;
    let mut cargo = cargo();
    for (name, _) in env::vars_os() {
        if CHANGE_BUILDS.iter().any(|it| name.as_encoded_bytes().starts_with(it.as_bytes())) {
            cargo.env_remove(name);
        }
    }
    // Without `--target`, the flags would also apply to build scripts and procedural macros, which cannot be static.
    cargo.args(["build", "--locked", "--package=quire-cli", "--profile=dist", "--target", target]);
    cargo.arg("--target-dir").arg(&place.built).current_dir(&place.sources);
    let lld_flags = if target.starts_with("x86_64") { &LLD_FLAGS[..] } else { &[] };
    cargo.env("CARGO_ENCODED_RUSTFLAGS", rust_flags(&prefixes, lld_flags));
    cargo.env("CARGO_INCREMENTAL", "0");
    let underscored = target.replace('-', "_");
    cargo.env(format!("CFLAGS_{underscored}"), c_flags(&prefixes));
    if let Some(linker) = cross_linker(target)? {
        cargo.env(format!("CARGO_TARGET_{}_LINKER", underscored.to_uppercase()), linker);
    }
    cargo.env("QUIRE_COMMIT", &commit.hash).env("SOURCE_DATE_EPOCH", &commit.seconds);
    shown(&mut cargo)?;
    checked(place.built.join(target).join("dist/quire"), &prefixes)
}

/// Compiles the binary for aarch64 with Debian's compiler.
fn binary_by_debian(place: &Place, commit: &Commit) -> Result<PathBuf> {
    let compiler = DebianCompiler::new(&Cache::open()?, &place.sources, &place.built)?;
    let cargo_home = PathBuf::from(debian_compiler::CARGO_HOME);
    let prefixes = prefixes_in(&cargo_home, &rig::process::cargo_home(), place)?;
    let underscored = debian_compiler::TARGET.replace('-', "_");
    let c_flags_name = format!("CFLAGS_{underscored}");
    let variables = [
        ("CARGO_ENCODED_RUSTFLAGS", rust_flags(&prefixes, &[])),
        (&c_flags_name, c_flags(&prefixes)),
        ("QUIRE_COMMIT", commit.hash.clone()),
        ("SOURCE_DATE_EPOCH", commit.seconds.clone()),
    ];
    let empty = tempfile::tempdir()?;
    let words = ["build", "--package=quire-cli", "--profile=dist"];
    shown(&mut compiler.cargo(empty.path(), &variables, &words)?)?;
    checked(compiler.binary("dist"), &prefixes)
}

/// Checks that a binary contains no path of this machine.
fn checked(binary: PathBuf, prefixes: &[Prefix]) -> Result<PathBuf> {
    let bytes = fs::read(&binary)?;
    let found = found_paths(&bytes, prefixes);
    if !found.is_empty() {
        bail!(Failed(format!("the binary contains paths of this machine: {found:?}")));
    }
    if bytes.len() > BYTES_MAX {
        let length = bytes.len();
        bail!(Failed(format!("the binary has {length} bytes, more than {BYTES_MAX}")));
    }
    if has_interpreter(&bytes) {
        bail!(Failed("the binary is not static: it has a dynamic linker".to_owned()));
    }
    Ok(binary)
}

/// Returns whether an ELF file of 64 bits, little-endian, names a dynamic linker. Source: elf(5).
pub(super) fn has_interpreter(elf: &[u8]) -> bool {
    let number = |at: usize, length: usize| {
        let bytes = elf.get(at..at + length).unwrap_or_default().iter().rev();
        bytes.fold(0_usize, |sum, byte| sum << 8 | usize::from(*byte))
    };
    // `e_phoff`, `e_phentsize` and `e_phnum`; each program header begins with its type, and 3 is `PT_INTERP`.
    let (start, size, count) = (number(0x20, 8), number(0x36, 2), number(0x38, 2));
    (0..count).any(|it| number(start + it * size, 4) == 3)
}

/// A directory of this machine, and the text that replaces it in the binary.
type Prefix = (PathBuf, String);

/// Returns the directories of source files. rustc uses the last one that fits.
fn prefixes(place: &Place, sysroot: &Path) -> Result<Vec<Prefix>> {
    let cargo_home = cargo_home();
    let mut prefixes = prefixes_in(&cargo_home, &cargo_home, place)?;
    prefixes.insert(1, (sysroot.to_owned(), "rust".to_owned()));
    Ok(prefixes)
}

/// Does the same without those of the toolchain. `cargo_home` is the path that the compiler has, and `here` the path of
/// the same directory on this machine.
fn prefixes_in(cargo_home: &Path, here: &Path, place: &Place) -> Result<Vec<Prefix>> {
    let mut prefixes = vec![
        (cargo_home.to_owned(), "cargo".to_owned()),
        (place.built.clone(), "target".to_owned()),
        (place.sources.clone(), "quire".to_owned()),
    ];
    // Each registry has a directory, whose name contains a digest of the registry's address.
    for registry in fs::read_dir(here.join("registry/src")).into_iter().flatten() {
        let name = registry?.file_name();
        prefixes.push((cargo_home.join("registry/src").join(name), "crates".to_owned()));
    }
    Ok(prefixes)
}

/// Returns the flags for rustc, separated as in CARGO_ENCODED_RUSTFLAGS.
fn rust_flags(prefixes: &[Prefix], linker: &[&str]) -> String {
    let flags = FLAGS.iter().chain(linker).map(|it| (*it).to_owned());
    let remap = |(path, name): &Prefix| format!("--remap-path-prefix={}={name}", path.display());
    flags.chain(prefixes.iter().map(remap)).collect::<Vec<_>>().join("\x1f")
}

/// Returns the flags for the C compiler, which compiles `zstd` and `ring`. No panic passes through their functions, so
/// these need no unwind tables.
fn c_flags(prefixes: &[Prefix]) -> String {
    let remap = |(path, name): &Prefix| format!("-ffile-prefix-map={}={name}", path.display());
    let tables = ["-fno-asynchronous-unwind-tables", "-fno-unwind-tables"].map(str::to_owned);
    prefixes.iter().map(remap).chain(tables).collect::<Vec<_>>().join(" ")
}

/// Returns the linker for another machine than this one.
fn cross_linker(target: &str) -> Result<Option<String>> {
    let machine = target.split('-').next().unwrap_or(target);
    if machine == env::consts::ARCH {
        return Ok(None);
    }
    let linker = format!("{machine}-linux-gnu-gcc");
    if find_program(&linker).is_none() {
        tools::install(&[(&linker, &format!("gcc-{machine}-linux-gnu"))])?;
    }
    // gcc prints the bare name if the library is absent.
    let library = quiet(Command::new(&linker).arg("-print-file-name=libc.a"))?;
    if !Path::new(library.trim_end()).is_absolute() {
        bail!(Skipped(format!("{linker} has no static C library, such as libc6-dev-arm64-cross")));
    }
    Ok(Some(linker))
}

/// Returns the directories whose paths are in the binary.
fn found_paths(binary: &[u8], prefixes: &[Prefix]) -> Vec<PathBuf> {
    let paths = prefixes.iter().map(|(path, _)| path);
    let has = |path: &&PathBuf| memmem(binary, path.as_os_str().as_encoded_bytes());
    paths.filter(has).cloned().collect()
}

fn memmem(all: &[u8], part: &[u8]) -> bool {
    all.windows(part.len().max(1)).any(|it| it == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Vec<Prefix> {
        [("/builder/.cargo", "cargo"), ("/src/quire", "quire")]
            .map(|(path, name)| (PathBuf::from(path), name.to_owned()))
            .to_vec()
    }

    #[test]
    fn paths_of_this_machine_are_found() {
        let check = |binary: &str, expected: &[&str]| {
            let expected: Vec<_> = expected.iter().map(PathBuf::from).collect();
            assert_eq!(found_paths(binary.as_bytes(), &example()), expected, "{binary}");
        };
        check("\0crates/cli/src/main.rs\0", &[]);
        check("\0/src/quire/crates/cli/src/main.rs\0", &["/src/quire"]);
        check("/builder/.cargo", &["/builder/.cargo"]);
        check("/builder/", &[]);
        check("", &[]);
    }

    #[test]
    fn a_dynamic_linker_is_found() {
        let test = fs::read(env::current_exe().unwrap()).unwrap();
        assert!(has_interpreter(&test), "programs of tests are dynamic");
        assert!(!has_interpreter(&[]) && !has_interpreter(b"\x7fELF"));
    }

    /// rustc and gcc replace these paths, in what they compile here.
    #[test]
    fn compilers_replace_the_paths() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().canonicalize().unwrap();
        fs::write(path.join("a.rs"), "fn main() { print!(\"{}\", file!()) }").unwrap();
        let prefixes = [(path.clone(), "quire".to_owned())];
        let flags = rust_flags(&prefixes, &LLD_FLAGS);
        let mut rustc = Command::new("rustc");
        rustc.args(flags.split('\x1f').filter(|it| it.starts_with("--remap")));
        quiet(rustc.arg(path.join("a.rs")).arg("-o").arg(path.join("a"))).unwrap();
        let binary = fs::read(path.join("a")).unwrap();
        assert_eq!(found_paths(&binary, &prefixes), Vec::<PathBuf>::new());
        assert_eq!(quiet(&mut Command::new(path.join("a"))).unwrap(), "quire/a.rs");
    }
}
