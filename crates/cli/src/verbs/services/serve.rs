//! `serve`: starts the services.

pub(crate) mod args;

use crate::Answer;
use crate::session::context::Context;
use crate::verbs::VerbArgs;
use crate::verbs::services::{lazy, mounts, registry, snapshotter, storage};

pub(crate) use args::Serve;

impl VerbArgs for Serve {
    const NAME: &'static str = "serve";
    const ABOUT: &'static str =
        "Serve lazy images, container engines, other hosts, users without root, or systemd";
    const DETAILS: &'static str = "\
        Five services, each a separate process. They run until they get TERM or INT.\n\n\
        `--lazy`: An image that is mounted with `--lazy` is not completely downloaded. Programs that read a \
        missing part wait until this service has fetched and verified it. If that fails, they get an I/O \
        error. If images are mounted when the service ends, their readers wait ten seconds for the next \
        service, and get I/O errors after that.\n\n\
        A second process, the keeper, makes sure that readers get no wrong bytes if the service dies. It then \
        starts another service. It exits when no lazy image is mounted. If both are killed at the same moment, \
        readers get I/O errors.\n\n\
        `--snapshotter`: containerd, and Docker and Kubernetes above it, get the roots of their containers \
        from this service, on a socket. The files of their images are in the store, each once and with its \
        digest. The engine must be configured: `--print-config` prints the lines to add to its configuration, \
        and `quire doctor` finds errors in it. Containers and their roots outlive the service, and the next \
        one takes them over. Settings are in the table `[snapshotter]` of /etc/quire/serve.toml. With `--metrics`, \
        the service serves metrics for Prometheus at `/metrics` by HTTP, and `/healthz` for health checks: whether \
        engines can connect.\n\n\
        `--mounts`: users who are not root get images from the kernel, for `quire run --via service`. The \
        service trusts none of their data. The table `[mounts]` of /etc/quire/serve.toml lists the users that \
        it serves. Its mounts outlive it.\n\n\
        `--storage`: images are read-only volumes for systemd's tools, for root, from Linux 6.15 on. `storagectl` \
        lists them, and `mount -t storage quire:NAME DIRECTORY` mounts them. The mounts outlive the service.\n\n\
        `--registry`: other hosts use this store as a mirror, which they name in their hosts.toml. The registry is \
        read-only. It serves images by digest: manifests, configs, kept blobs, and the uncompressed tars of layers, \
        which Quire on other hosts asks for. It serves only the repositories that `--repository` names, and only images \
        that the policies accept. Everyone who reaches the address can read these images, so only name private repositories \
        if that is right. It has no TLS: for a network that is not trusted, put a proxy with TLS before it.";
    const EXAMPLES: &'static str = "quire serve --lazy\n  quire serve --lazy --replace\n  quire serve --snapshotter\n  \
         quire serve --snapshotter --print-config containerd --version 2.4\n  \
         quire serve --registry --listen 10.0.0.5:5500 --repository 'docker.io/library/*'";
    const PRINTS_JSON: bool = false;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        serve(context, self)
    }
}

fn serve(context: &Context, args: &Serve) -> anyhow::Result<Answer> {
    args.registry.check_several()?;
    if args.snapshotter {
        return snapshotter::serve(context, args);
    }
    if args.mounts {
        return mounts::serve(context, args);
    }
    if args.storage {
        return storage::serve(context, args);
    }
    if args.serve_registry {
        return registry::serve(context, args);
    }
    lazy::serve(context, args)
}
