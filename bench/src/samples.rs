//! The images, and the programs that run in them.

use std::path::PathBuf;

use anyhow::{Context as _, Result};

use crate::measure::Until;
use rig::cache::Cache;
use rig::inputs::{self, programs};

/// An image.
#[derive(Debug)]
pub(super) struct Sample {
    /// Repository in the registry.
    pub(super) name: &'static str,
    /// Name of the input in the cache.
    input: &'static str,
    pub(super) programs: &'static [Program],
}

/// A program that runs in a container.
#[derive(Debug, Clone, Copy)]
pub(super) struct Program {
    pub(super) title: &'static str,
    /// Name of the program's trace.
    pub(super) trace: &'static str,
    pub(super) user: &'static str,
    pub(super) until: Until,
    pub(super) arguments: &'static [&'static str],
}

impl Program {
    /// A program that runs as root and is timed until its first output.
    const fn new(
        title: &'static str,
        trace: &'static str,
        arguments: &'static [&'static str],
    ) -> Self {
        Self { title, trace, user: "root", until: Until::FirstOutput, arguments }
    }
}

/// Starts nginx and repeats a request until it gets a response, like a readiness probe.
const NGINX: &str = r#"
nginx -g 'daemon off;' 2> /dev/null &
ask() { exec 3<> /dev/tcp/127.0.0.1/80 && printf 'GET / HTTP/1.0\r\n\r\n' >&3 && head -n 1 <&3; }
until answer=$(ask 2> /dev/null); do sleep 0.01; done
echo "$answer"
kill $!
wait
[[ $answer = *' 200 '* ]]
"#;

/// Initializes and starts a database server, like the first start of a database image.
const SERVER: &str = "
cd /usr/lib/postgresql/15/bin
./initdb --no-sync --pgdata /tmp/data > /dev/null
./postgres -D /tmp/data -k /tmp 2> /dev/null &
until ./psql -h /tmp -Atc 'select 1' postgres 2> /dev/null; do sleep 0.01; done
kill -INT $!
wait
";

pub(super) static SAMPLES: [Sample; 5] = [
    Sample {
        name: "postgres",
        input: "debian-postgres",
        programs: &[
            Program::new(
                "postgres --version",
                "version",
                &["/usr/lib/postgresql/15/bin/postgres", "--version"],
            ),
            Program {
                title: "initdb",
                trace: "initdb",
                user: "postgres",
                until: Until::End,
                arguments: &[
                    "/usr/lib/postgresql/15/bin/initdb",
                    "--no-sync",
                    "--pgdata",
                    "/tmp/data",
                ],
            },
            Program {
                title: "PostgreSQL answers",
                trace: "server",
                user: "postgres",
                until: Until::FirstOutput,
                arguments: &["bash", "-euc", SERVER],
            },
        ],
    },
    Sample {
        name: "numpy",
        input: "debian-numpy",
        programs: &[Program::new(
            "numpy adds",
            "numpy",
            &["python3", "-c", "import numpy; print(numpy.arange(9).sum())"],
        )],
    },
    Sample {
        name: "node",
        input: "debian-node",
        programs: &[Program::new("node prints", "node", &["node", "-e", "console.log(1)"])],
    },
    Sample {
        name: "jvm",
        input: "debian-jvm",
        programs: &[Program::new("java --version", "java", &["java", "--version"])],
    },
    Sample {
        name: "nginx",
        input: "debian-nginx",
        programs: &[Program::new("nginx answers", "nginx", &["bash", "-euc", NGINX])],
    },
];

/// The image of this name.
pub(super) fn find(name: &str) -> &'static Sample {
    SAMPLES.iter().find(|it| it.name == name).expect("a sample of this name")
}

impl Sample {
    /// The image's OCI layout, made unless the cache has it.
    pub(super) fn layout(&self, cache: &Cache) -> Result<PathBuf> {
        if self.input == "debian-postgres" {
            return inputs::debian_postgres(cache, false);
        }
        let known = programs::PROGRAMS.into_iter().find(|(name, _)| *name == self.input);
        let (name, packages) = known.with_context(|| format!("no input {}", self.input))?;
        programs::make(cache, name, packages, false)
    }
}
