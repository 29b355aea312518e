//! Resource limits of processes, as for setrlimit(2).

use std::str::FromStr;

use rustix::process::{Resource, Rlimit, getrlimit};
use serde::{Deserialize, Serialize};

use super::capabilities::has_sys_resource;
use crate::bundle::spec::{SpecLimit, SpecProcess};

/// Names of limits on the command line, for runtimes and for the kernel. Source: Docker, `run --ulimit`; OCI
/// runtime-spec.
const NAMES: [(&str, &str, Resource); 16] = [
    ("as", "RLIMIT_AS", Resource::As),
    ("core", "RLIMIT_CORE", Resource::Core),
    ("cpu", "RLIMIT_CPU", Resource::Cpu),
    ("data", "RLIMIT_DATA", Resource::Data),
    ("fsize", "RLIMIT_FSIZE", Resource::Fsize),
    ("locks", "RLIMIT_LOCKS", Resource::Locks),
    ("memlock", "RLIMIT_MEMLOCK", Resource::Memlock),
    ("msgqueue", "RLIMIT_MSGQUEUE", Resource::Msgqueue),
    ("nice", "RLIMIT_NICE", Resource::Nice),
    ("nofile", "RLIMIT_NOFILE", Resource::Nofile),
    ("nproc", "RLIMIT_NPROC", Resource::Nproc),
    ("rss", "RLIMIT_RSS", Resource::Rss),
    ("rtprio", "RLIMIT_RTPRIO", Resource::Rtprio),
    ("rttime", "RLIMIT_RTTIME", Resource::Rttime),
    ("sigpending", "RLIMIT_SIGPENDING", Resource::Sigpending),
    ("stack", "RLIMIT_STACK", Resource::Stack),
];

/// Value for no limit. Source: `linux/resource.h`, `RLIM_INFINITY`.
const UNLIMITED: u64 = u64::MAX;

/// Reason why a container cannot have a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RlimitError {
    /// The text is not `NAME=SOFT[:HARD]`.
    #[error(
        "\"{0}\" is not a limit: write NAME=SOFT[:HARD], for example nofile=1024:4096; each is a number, or -1 for no \
         limit"
    )]
    Syntax(String),
    /// The name is unknown.
    #[error(
        "there is no limit \"{0}\": use as, core, cpu, data, fsize, locks, memlock, msgqueue, \
        nice, nofile, nproc, rss, rtprio, rttime, sigpending or stack"
    )]
    Unknown(String),
    /// The soft limit is above the hard limit.
    #[error("the soft limit of {0} is above the hard one")]
    Order(&'static str),
    /// Only a privileged process may raise the limit.
    #[error(
        "{name} cannot be more than {most}, this process's own limit: raising it needs CAP_SYS_RESOURCE"
    )]
    Raise {
        name: &'static str,
        /// Hard limit of this process.
        most: u64,
    },
}

/// A limit of every process of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Limit {
    index: usize,
    soft: u64,
    hard: u64,
}

impl FromStr for Limit {
    type Err = RlimitError;

    fn from_str(text: &str) -> Result<Self, RlimitError> {
        let syntax = || RlimitError::Syntax(text.to_owned());
        let number = |text: &str| match text {
            "-1" | "unlimited" => Ok(UNLIMITED),
            text => text.parse().map_err(|_not_a_number| syntax()),
        };
        let (name, value) = text.split_once('=').ok_or_else(syntax)?;
        let (soft, hard) = value.split_once(':').unwrap_or((value, value));
        let index = NAMES.iter().position(|it| it.0 == name.to_ascii_lowercase());
        let index = index.ok_or_else(|| RlimitError::Unknown(name.to_owned()))?;
        let limit = Self { index, soft: number(soft)?, hard: number(hard)? };
        if limit.soft > limit.hard {
            return Err(RlimitError::Order(limit.name()));
        }
        Ok(limit)
    }
}

impl TryFrom<String> for Limit {
    type Error = RlimitError;

    fn try_from(text: String) -> Result<Self, RlimitError> {
        text.parse()
    }
}

/// Formats the limit in the syntax of the command line.
impl From<Limit> for String {
    fn from(limit: Limit) -> Self {
        let number = |value: u64| match value {
            UNLIMITED => "-1".to_owned(),
            value => value.to_string(),
        };
        format!("{}={}:{}", limit.name(), number(limit.soft), number(limit.hard))
    }
}

impl Limit {
    fn name(&self) -> &'static str {
        NAMES.get(self.index).map_or("", |it| it.0)
    }

    /// Checks that this process may set the limit.
    pub fn check(&self) -> Result<(), RlimitError> {
        let own = NAMES.get(self.index).and_then(|it| getrlimit(it.2).maximum);
        match own {
            Some(most) if self.hard > most && !has_sys_resource() => {
                Err(RlimitError::Raise { name: self.name(), most })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn entry(&self) -> SpecLimit {
        let name = NAMES.get(self.index).map_or("", |it| it.1);
        SpecLimit { kind: name.to_owned(), soft: self.soft, hard: self.hard }
    }
}

/// Gives a program the limits of this process's caller, where this process has changed its own limits and the
/// container sets none.
pub(crate) fn of_caller(process: &mut SpecProcess) {
    add(kernel::process::changed_limits(), &mut process.rlimits);
}

fn add(limits: Vec<(Resource, Rlimit)>, to: &mut Vec<SpecLimit>) {
    for (resource, limit) in limits {
        let Some((_, kind, _)) = NAMES.iter().find(|it| it.2 == resource) else { continue };
        if to.iter().any(|it| it.kind == *kind) {
            continue;
        }
        let [soft, hard] = [limit.current, limit.maximum].map(|it| it.unwrap_or(UNLIMITED));
        to.push(SpecLimit { kind: (*kind).to_owned(), soft, hard });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_the_caller_are_those_that_nobody_asked_for() {
        let limit = |current, maximum| Rlimit { current, maximum };
        let asked = SpecLimit { kind: "RLIMIT_NOFILE".to_owned(), soft: 5, hard: 6 };
        let mut limits = vec![asked.clone()];
        let changed = vec![
            (Resource::Stack, limit(Some(65_536), None)),
            (Resource::Nofile, limit(Some(1), Some(2))),
        ];
        add(changed, &mut limits);
        let stack = SpecLimit { kind: "RLIMIT_STACK".to_owned(), soft: 65_536, hard: UNLIMITED };
        assert_eq!(limits, [asked, stack]);
    }

    #[test]
    fn limits_are_one_number_or_two() {
        let check = |text: &str, expect: Result<(&str, u64, u64), &str>| {
            let found = text.parse::<Limit>();
            match (&found, expect) {
                (Ok(it), Ok((kind, soft, hard))) => {
                    assert_eq!(it.entry(), SpecLimit { kind: kind.to_owned(), soft, hard });
                    let again = serde_json::to_string(it).unwrap();
                    assert_eq!(&serde_json::from_str::<Limit>(&again).unwrap(), it, "{again}");
                }
                (Err(error), Err(expect)) => assert!(error.to_string().contains(expect), "{error}"),
                _ => panic!("{text}: {found:?}, not {expect:?}"),
            }
        };
        check("nofile=7", Ok(("RLIMIT_NOFILE", 7, 7)));
        check("NPROC=1:2", Ok(("RLIMIT_NPROC", 1, 2)));
        check("core=0:-1", Ok(("RLIMIT_CORE", 0, u64::MAX)));
        check("stack=unlimited", Ok(("RLIMIT_STACK", u64::MAX, u64::MAX)));
        check("nofile=2:1", Err("above the hard one"));
        check("files=2", Err("no limit \"files\""));
        for text in ["", "nofile", "nofile=", "nofile=x", "nofile=1:2:3", "nofile=-2"] {
            check(text, Err("NAME=SOFT[:HARD]"));
        }
    }
}
