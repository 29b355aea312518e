//! `serve --registry`: starts the read-only registry for other hosts.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use anyhow::{Context as _, anyhow, bail};
use oci::policy::Pattern;
use serve::registry::{RegistryResources, serve_registry};
use store::OpenOptions;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::policy::policies;
use crate::verbs::services::notify::{self, ServiceStep};

/// Default address: the registry is not reachable from other hosts.
const LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 5500);

pub(crate) fn serve(
    context: &Context,
    args: &crate::verbs::services::serve::args::Serve,
) -> anyhow::Result<Answer> {
    let repositories = args.repository.iter().map(|it| pattern(it)).collect::<Result<_, _>>()?;
    // The service may be started at boot, before the first pull.
    let options =
        if context.who().is_host_root() { OpenOptions::create() } else { OpenOptions::read() };
    let store = context.open(options)?;
    // Errors in the policies are reported now, and not at the first request.
    drop(policies(context)?);
    let address = args.listen.unwrap_or(LISTEN);
    let listener = TcpListener::bind(address)
        .with_context(|| format!("cannot listen on {address}: choose another --listen"))?;
    // With port 0, the kernel has chosen the port.
    let address = listener.local_addr().context("cannot find the address of the socket")?;
    let of_policies = context.clone();
    let resources = RegistryResources {
        store,
        repositories,
        tags: args.tags,
        policies: Box::new(move || policies(&of_policies).map_err(|error| format!("{error:#}"))),
    };
    let ready = || {
        if !context.is_quiet() {
            // A failed write is ignored, because the process that started the service may have closed the pipe.
            let _told = report::line(&format!("serving images at http://{address}"));
        }
        notify::tell(ServiceStep::Ready);
    };
    notify::serve_until_asked(|stop| serve_registry(resources, listener, stop, ready))??;
    Ok(Answer::Yes)
}

fn pattern(text: &str) -> anyhow::Result<Pattern> {
    match Pattern::parse(text).map_err(|why| anyhow!("--repository: {why}"))? {
        Pattern::Local => bail!(
            "--repository: \"local\" is not a repository. Images that were made on this host are \
            served if their name has a registry: write the pattern of that name"
        ),
        pattern => Ok(pattern),
    }
}
