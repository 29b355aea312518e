//! Likely causes of a failed start that the runtime's own message does not name.

use std::fs::File;
use std::io::Read as _;

use crate::bundle::spec::SpecLimit;
use crate::runtime::elf::HEADERS;
use crate::runtime::program::is_static;
use crate::runtime::{Kind, Runtime};

/// Resource limits that also apply to the runtime while it starts the program, with values that are large enough for
/// any runtime. crun 1.8 needs up to 32 descriptors (measured), and runc reserves up to one GiB of addresses, as every
/// Go program does.
const AMPLE: [(&str, &str, u64); 3] = [
    ("RLIMIT_NOFILE", "nofile", 64),
    ("RLIMIT_AS", "as", 1 << 30),
    ("RLIMIT_DATA", "data", 1 << 30),
];

/// Returns the likely cause as the end of an error's text, or an empty text if no cause is known.
pub(crate) fn likely(runtime: &Runtime, limits: &[SpecLimit], message: &str) -> String {
    let low = |(kind, name, ample): &(&str, &str, u64)| {
        let limit = limits.iter().find(|it| it.kind == *kind && it.soft < *ample)?;
        Some(format!("{name}={}", limit.soft))
    };
    let low: Vec<_> = AMPLE.iter().filter_map(low).collect();
    if !low.is_empty() {
        return format!(
            "; the limits {} also apply to the runtime, and may be too low",
            low.join(", ")
        );
    }
    // runsc executes itself again in a root without a loader and libraries.
    if runtime.kind == Kind::Runsc && message.contains("/proc/self/exe") && is_dynamic(runtime) {
        return "; this runsc needs libraries: use a release of gVisor, or build it with CGO_ENABLED=0".to_owned();
    }
    String::new()
}

fn is_dynamic(runtime: &Runtime) -> bool {
    let mut start = Vec::new();
    let read = File::open(&runtime.path).and_then(|it| it.take(HEADERS).read_to_end(&mut start));
    read.is_ok() && !is_static(&start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(kind: &str, soft: u64) -> SpecLimit {
        SpecLimit { kind: kind.to_owned(), soft, hard: soft }
    }

    #[test]
    fn low_limits_are_named_and_others_are_not() {
        let crun = Runtime { path: "/bin/sh".into(), kind: Kind::Crun };
        let cause = |limits: &[SpecLimit]| likely(&crun, limits, "Too many open files");
        assert_eq!(cause(&[]), "");
        assert_eq!(cause(&[limit("RLIMIT_NOFILE", 1024), limit("RLIMIT_CORE", 0)]), "");
        let both = cause(&[limit("RLIMIT_NOFILE", 5), limit("RLIMIT_AS", 1)]);
        assert!(
            both.starts_with("; the limits nofile=5, as=1 also apply to the runtime"),
            "{both}"
        );
    }

    #[test]
    fn a_runsc_that_needs_libraries_is_recognized() {
        // The test's own program needs libraries.
        let dynamic = Runtime { path: std::env::current_exe().unwrap(), kind: Kind::Runsc };
        let message = "starting sandbox: fork/exec /proc/self/exe: no such file or directory";
        assert!(likely(&dynamic, &[], message).contains("CGO_ENABLED=0"));
        assert_eq!(likely(&dynamic, &[], "no space left on device"), "");
        let crun = Runtime { kind: Kind::Crun, ..dynamic };
        assert_eq!(likely(&crun, &[], message), "");
        let text = Runtime { path: "/etc/passwd".into(), kind: Kind::Crun };
        assert_eq!(likely(&text, &[], message), "");
    }
}
