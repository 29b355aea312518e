//! The immutable flag and fs-verity, as far as this kernel supports them.

use std::fs::{self, File};
use std::os::fd::AsFd as _;

use kernel::seal::{Sealed, clear_immutable, sealed, set_immutable};
use kernel::verity::{self, Algorithm, Enabled, Measured, VerityError};

use crate::stage::{Stage, skipped};

#[test]
fn immutable_files_stay() {
    let Some(stage) = Stage::new(&[]) else { return };
    let path = stage.path("file");
    fs::write(&path, "text").unwrap();
    let file = File::open(&path).unwrap();
    assert_eq!(sealed(file.as_fd()).unwrap(), Sealed::No);
    clear_immutable(file.as_fd()).unwrap();
    set_immutable(file.as_fd()).unwrap();
    set_immutable(file.as_fd()).unwrap();
    assert_eq!(sealed(file.as_fd()).unwrap(), Sealed::Immutable);
    fs::write(&path, "new").unwrap_err();
    fs::remove_file(&path).unwrap_err();
    fs::hard_link(&path, stage.path("link")).unwrap_err();
    clear_immutable(file.as_fd()).unwrap();
    assert_eq!(sealed(file.as_fd()).unwrap(), Sealed::No);
    assert_eq!(fs::read_to_string(&path).unwrap(), "text");
    fs::remove_file(&path).unwrap();
}

#[test]
fn procfs_has_no_flags() {
    let file = File::open("/proc/self/status").unwrap();
    assert_eq!(sealed(file.as_fd()).unwrap(), Sealed::No);
    let error = set_immutable(file.as_fd()).unwrap_err();
    assert!(matches!(error, kernel::seal::SealError::Unsupported { .. }), "{error:?}");
}

/// fs-verity digest of 100,000 times "a", from `fsverity digest` of fsverity-utils.
const A_SHA256: &str = "c52abacd52ffc50b73d24334d69a7d32d1986abf9a021419c7359796bf143941";

#[test]
fn no_verity_while_open_for_writing() {
    let Some(stage) = Stage::new(&[]) else { return };
    let file = File::create(stage.path("file")).unwrap();
    let same = kernel::files::reopen_read_only(file.as_fd()).unwrap();
    match verity::enable(same.as_fd(), Algorithm::Sha256).unwrap_err() {
        VerityError::OpenForWriting { .. } => {}
        error if error.is_unsupported() => skipped(&format!("no fs-verity to test: {error}")),
        error => panic!("{error:?}"),
    }
    drop(file);
    match verity::enable(same.as_fd(), Algorithm::Sha512) {
        Ok(_) => assert!(matches!(verity::measure(same.as_fd()), Ok(Some(Measured::Sha512(_))))),
        Err(error) => assert!(error.is_unsupported(), "{error:?}"),
    }
}

#[test]
fn verity_or_why_not() {
    let Some(stage) = Stage::new(&[]) else { return };
    let path = stage.path("file");
    fs::write(&path, "a".repeat(100_000)).unwrap();
    let file = File::open(&path).unwrap();
    match verity::enable(file.as_fd(), Algorithm::Sha256) {
        Ok(enabled) => {
            assert_eq!(enabled, Enabled::Now);
            let again = verity::enable(file.as_fd(), Algorithm::Sha256).unwrap();
            assert_eq!(again, Enabled::Before);
            let Some(Measured::Sha256(digest)) = verity::measure(file.as_fd()).unwrap() else {
                panic!("SHA-256 was asked for");
            };
            let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, A_SHA256);
            assert_eq!(sealed(file.as_fd()).unwrap(), Sealed::Verity);
            fs::write(&path, "new").unwrap_err();
            let _stays_open = file;
        }
        Err(error) => {
            assert!(error.is_unsupported(), "{error:?}");
            let measured = verity::measure(file.as_fd());
            assert!(matches!(
                measured,
                Ok(None)
                    | Err(VerityError::NoKernelSupport { .. } | VerityError::NotEnabled { .. })
            ));
            skipped(&format!("no fs-verity to test: {error}"));
        }
    }
}
