//! The first step of a verb: a user who is not root enters a user namespace, if the verb needs rights there.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::slice;

use container::bundle::Network;
use container::bundle::mounts::MountSource;
use container::folder::LAYER;
use container::life::background;
use container::life::lookup::{self, KnownContainer};
use container::listed_settings::ListedSettings;
use container::request::StoredRequest;
use container::root::{WritableChoice, suits_overlay};
use kernel::mount::Propagation;
use kernel::process::{Namespace, Who};
use store::{OpenOptions, Store};

use crate::args::{ContainerOptions, NetworkKind, volumes};
use crate::session::own_namespace::{
    Written, changes_can_stay, enter_own_namespace, has_rights, name_of_user,
};
use crate::session::scope;
use crate::verbs::Verb;
use crate::verbs::containers::changes::changes_file;
use crate::verbs::containers::networks::join;
use crate::verbs::containers::ps::filtered;
use crate::verbs::containers::run::NewContainer;
use crate::verbs::containers::snapshots::snapshot::SnapshotAction;
use crate::verbs::store::system::SystemAction;

/// Moves this process into a user namespace if the verb needs rights that its user has only in one. The process must
/// be single-threaded. `remark` is called about optional steps that failed. Returns whether the process has entered a
/// namespace.
pub(crate) fn enter(
    verb: &Verb,
    store: Option<&Path>,
    who: Who,
    remark: &mut dyn FnMut(String),
) -> anyhow::Result<bool> {
    if joins_networks(verb, store, who) {
        // Limits need the scope before the namespace is entered, as below.
        join_scope(verb, who, remark);
        return join::enter(who, remark);
    }
    if has_rights(who) {
        return Ok(false);
    }
    match verb {
        Verb::Run(args) => {
            // The scope is joined before the namespace is entered, because the service manager does not know the
            // namespace's users.
            let name = name_of_user(who.user);
            match scope::for_limits(
                args.new.wanted.has_limits(),
                args.detach,
                who.user,
                name.as_deref(),
            ) {
                Ok(said) => said.into_iter().for_each(&mut *remark),
                Err(error) => remark(format!("{error:#}")),
            }
            enter_for(&args.new, store, who, remark)
        }
        Verb::Create(args) => enter_for(&args.new, store, who, remark),
        Verb::Start(args) if args.print_unit => Ok(false),
        Verb::Start(args) if args.is_of_all() => {
            enter_again(&all_ids(store, who), store, who, remark)
        }
        Verb::Start(args) => enter_again(&args.containers, store, who, remark),
        Verb::Restart(args) if args.is_of_all() => {
            enter_again(&all_ids(store, who), store, who, remark)
        }
        Verb::Restart(args) => enter_again(&args.containers, store, who, remark),
        Verb::Fork(args) => enter_again(slice::from_ref(&args.container), store, who, remark),
        Verb::Rollback(args) => enter_again(slice::from_ref(&args.container), store, who, remark),
        Verb::Snapshot(args) => match (args.action, &*args.names) {
            (SnapshotAction::Create, [container, ..]) => {
                join_container(find_container(container, store, who), who, remark)
            }
            (SnapshotAction::Rm, _) => enter_own_namespace(who, Written::Stays, &mut |_| ()),
            _ => Ok(false),
        },
        Verb::Exec(args) => {
            let found = find_container(&args.container, store, who);
            if let Some((_, found)) = &found {
                let moved = scope::to_join(&found.folder, who.user);
                moved.unwrap_or_else(|error| remark(format!("{error:#}")));
            }
            join_container(found, who, remark)
        }
        // The first container decides: a process can be in the namespace of only one.
        Verb::Cp(args) => {
            let found = args.containers().find_map(|it| find_container(it, store, who));
            join_container(found, who, remark)
        }
        // Files that a container has written to the disk belong to ids of such a namespace.
        Verb::System(args) if args.action == SystemAction::Prune => {
            enter_own_namespace(who, Written::Stays, &mut |_| ())
        }
        Verb::Rm(args)
            if args.volumes
                || args.all
                || !args.filter.is_empty()
                || args.names.iter().any(|it| is_left_on_disk(it, store, who)) =>
        {
            // Remarks about ids matter only to containers that start.
            enter_own_namespace(who, Written::Stays, &mut |_| ())
        }
        Verb::Gc(args) if !args.dry_run && is_garbage_on_disk(store, who) => {
            enter_own_namespace(who, Written::Stays, &mut |_| ())
        }
        Verb::Volume(args) if args.touches_files() => {
            enter_own_namespace(who, Written::Stays, &mut |_| ())
        }
        Verb::Network(args) if args.removes() => {
            enter_own_namespace(who, Written::Stays, &mut |_| ())
        }
        Verb::Commit(args) => {
            join_container(find_container(&args.container, store, who), who, remark)
        }
        Verb::Export(args) if changes_file(&args.target).is_some() => {
            join_container(find_container(&args.name, store, who), who, remark)
        }
        // Without a second argument, a container is compared with its image.
        Verb::Diff(args) if args.new.is_none() => {
            let found = match &args.old {
                Some(old) => {
                    let name = old.to_string_lossy();
                    find_container(name.split(":/").next().unwrap_or_default(), store, who)
                }
                None => latest(store, who).and_then(|it| find_container(&it, store, who)),
            };
            join_container(found, who, remark)
        }
        _ => Ok(false),
    }
}

/// Returns the ids of all containers of this user.
fn all_ids(store: Option<&Path>, who: Who) -> Vec<String> {
    let directory = crate::session::context::store_directory(store, who).ok();
    let store = directory.and_then(|it| Store::open(&it, who, OpenOptions::read()).ok());
    store.and_then(|it| it.containers.ids().ok()).unwrap_or_default()
}

/// Returns the id of the container that was made last.
fn latest(store: Option<&Path>, who: Who) -> Option<String> {
    let directory = crate::session::context::store_directory(store, who).ok()?;
    let store = Store::open(&directory, who, OpenOptions::read()).ok()?;
    Some(filtered(&store, &[]).ok()?.pop()?.id)
}

/// Whether the verb starts a container that joins networks of the store. All such containers of a user are in one user
/// namespace.
fn joins_networks(verb: &Verb, store: Option<&Path>, who: Who) -> bool {
    if who.is_host_root() {
        return false;
    }
    let is_named = |it: &NewContainer| matches!(it.wanted.network, Some(NetworkKind::Named(_)));
    let are_named = |all: &[String]| {
        all.iter()
            .filter_map(|it| find_container(it, store, who))
            .any(|(_, it)| ListedSettings::load(&it.folder).is_ok_and(|it| !it.networks.is_empty()))
    };
    match verb {
        Verb::Run(args) => is_named(&args.new),
        // The addresses of a container are chosen when it starts.
        Verb::Create(args) => is_named(&args.new),
        Verb::Start(args) => are_named(&args.containers),
        Verb::Restart(args) => are_named(&args.containers),
        Verb::Fork(args) => are_named(slice::from_ref(&args.container)),
        _ => false,
    }
}

/// Moves this process into a scope in which the limits of its container apply.
fn join_scope(verb: &Verb, who: Who, remark: &mut dyn FnMut(String)) {
    let Verb::Run(args) = verb else { return };
    let name = name_of_user(who.user);
    match scope::for_limits(args.new.wanted.has_limits(), args.detach, who.user, name.as_deref()) {
        Ok(said) => said.into_iter().for_each(&mut *remark),
        Err(error) => remark(format!("{error:#}")),
    }
}

/// Moves this process into a namespace for containers that are started again.
fn enter_again(
    containers: &[String],
    store: Option<&Path>,
    who: Who,
    remark: &mut dyn FnMut(String),
) -> anyhow::Result<bool> {
    let mut found = containers.iter().filter_map(|it| find_container(it, store, who));
    let has_limits = found.any(|(_, it)| {
        let stored = StoredRequest::load(&it.folder, &it.id);
        stored.is_ok_and(|it| it.request.bundle.is_limited)
    });
    let joined = containers.iter().find_map(|it| {
        let (_, found) = find_container(it, store, who)?;
        match StoredRequest::load(&found.folder, &found.id).ok()?.request.bundle.network {
            Network::Container(other) => find_container(&other, store, who),
            _ => None,
        }
    });
    let name = name_of_user(who.user);
    match scope::for_limits(has_limits, true, who.user, name.as_deref()) {
        Ok(said) => said.into_iter().for_each(&mut *remark),
        Err(error) => remark(format!("{error:#}")),
    }
    if joined.is_some() {
        return join_container(joined, who, remark);
    }
    // The files that a container wrote belong to ids of such a namespace.
    enter_own_namespace(who, Written::Stays, remark)
}

/// Moves this process into a namespace for a new container.
fn enter_for(
    new: &NewContainer,
    store: Option<&Path>,
    who: Who,
    remark: &mut dyn FnMut(String),
) -> anyhow::Result<bool> {
    // Only the user namespace of the other container has rights over its network.
    if let Some(NetworkKind::Container(other)) = &new.wanted.network {
        return join_container(find_container(other, store, who), who, remark);
    }
    // The files of the container to replace, and those of volumes, belong to ids of a namespace that is the same each
    // time.
    let replaced = new.name.as_deref().filter(|_| new.replace);
    let written = match replaced.is_some_and(|it| is_left_on_disk(it, store, who))
        || has_named_volumes(&new.wanted)
    {
        true => Written::Stays,
        false => written(&new.wanted, store, who),
    };
    enter_own_namespace(who, written, remark)
}

/// Whether a volume of the store is mounted.
fn has_named_volumes(wanted: &ContainerOptions) -> bool {
    let volumes = volumes(wanted).unwrap_or_default();
    volumes.iter().any(|it| !matches!(it.source, MountSource::Host(_)))
}

/// Returns whether the changes of a container with these options stay on the disk.
fn written(wanted: &ContainerOptions, store: Option<&Path>, who: Who) -> Written {
    let is_on_disk = || {
        let directory = crate::session::context::store_directory(store, who);
        changes_can_stay(who) && directory.is_ok_and(|it| suits_overlay(&it))
    };
    match wanted.writable {
        Some(WritableChoice::Directory(..) | WritableChoice::Folder(..)) => Written::Stays,
        None if !wanted.read_only && is_on_disk() => Written::Stays,
        _ => Written::Goes,
    }
}

/// Finds a container of this user, and its store.
fn find_container(
    container: &str,
    store: Option<&Path>,
    who: Who,
) -> Option<(Store, KnownContainer)> {
    let directory = crate::session::context::store_directory(store, who).ok()?;
    let store = Store::open(&directory, who, OpenOptions::read()).ok()?;
    let found = lookup::find_container(&store, container).ok()?;
    Some((store, found))
}

/// Returns whether a container has ended and its folder has a writable layer.
fn is_left_on_disk(container: &str, store: Option<&Path>, who: Who) -> bool {
    let found = find_container(container, store, who);
    found.is_some_and(|(_, it)| !it.is_running() && it.folder.join(LAYER).exists())
}

/// Returns whether the store has writable layers of removed containers, or snapshots of containers to remove.
fn is_garbage_on_disk(store: Option<&Path>, who: Who) -> bool {
    let Ok(directory) = crate::session::context::store_directory(store, who) else { return false };
    let Ok(store) = Store::open(&directory, who, OpenOptions::read()) else { return false };
    store.containers.is_left(LAYER).unwrap_or(false)
        || store.has_unneeded_container_snapshots().unwrap_or(false)
        || store.unneeded_volumes().is_ok_and(|it| !it.is_empty())
}

/// Moves this process into the namespace of a container of the same user. Other problems of the container are
/// reported by the verb itself.
fn join_container(
    found: Option<(Store, KnownContainer)>,
    who: Who,
    remark: &mut dyn FnMut(String),
) -> anyhow::Result<bool> {
    let Some((store, found)) = found else { return Ok(false) };
    if !found.is_running() {
        // The files that the container wrote belong to ids of such a namespace.
        return enter_own_namespace(who, Written::Stays, remark);
    }
    if lookup::running(&store, &found.id, &|| false).is_err() {
        return Ok(false);
    }
    let Some(process) = background::elsewhere(&found.folder) else { return Ok(false) };
    kernel::process::enter(process.as_fd(), &[Namespace::User])?;
    // The runtime may need to hide mounts from itself.
    kernel::process::own_mounts(Propagation::Private)?;
    Ok(true)
}
