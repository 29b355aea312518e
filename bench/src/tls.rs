//! A registry that requires TLS and a token, as public registries do: HAProxy in front of a registry on loopback.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use rig::Skipped;
use testing::daemon::Daemon;

use crate::command::run;

/// The token that clients get and must send.
pub(super) const TOKEN: &str = "bench";

/// A running HAProxy.
#[derive(Debug)]
pub(super) struct Front {
    daemon: Daemon,
    /// The certificate, which is its own authority.
    pub(super) certificate: PathBuf,
}

impl Front {
    /// Starts HAProxy in front of a server that speaks HTTP without TLS. The files are in the folder `work`.
    pub(super) fn start(work: &Path, server: &str) -> Result<Self> {
        let [certificate, key, both] =
            ["front.crt", "front.key", "front.pem"].map(|it| work.join(it));
        run!(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=bench",
            "-addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:false",
            "-keyout {key} -out {certificate}"
        )?;
        fs::write(&both, [fs::read(&certificate)?, fs::read(&key)?].concat())?;
        let daemon = Daemon::serve(work, |folder, host| {
            let file = folder.join("haproxy.cfg");
            fs::write(&file, settings(&both, &host.to_string(), server))?;
            let mut command = Command::new("haproxy");
            command.arg("-f").arg(file);
            Ok(command)
        });
        let daemon = daemon.context("cannot start haproxy")?;
        let daemon = daemon.ok_or_else(|| Skipped(String::from("haproxy is not installed")))?;
        Ok(Self { daemon, certificate })
    }

    /// Host and port.
    pub(super) fn host(&self) -> &str {
        &self.daemon.host
    }
}

/// Source of the challenge's form: the distribution project's token authentication.
fn settings(certificate: &Path, host: &str, server: &str) -> String {
    format!(
        r#"defaults
    mode http
    timeout connect 10s
    timeout client 300s
    timeout server 300s
frontend tls
    bind {host} ssl crt {} alpn h2,http/1.1
    http-request return status 200 content-type application/json string '{{"token":"{TOKEN}"}}' if {{ path /token }}
    http-request return status 401 hdr WWW-Authenticate 'Bearer realm="https://%[req.hdr(host)]/token",service="bench"' unless {{ req.hdr(authorization) "Bearer {TOKEN}" }}
    default_backend registry
backend registry
    server registry {server}
"#,
        certificate.display()
    )
}
