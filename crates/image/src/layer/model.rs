//! A slow and simple implementation of the rules of layers, to compare with: maps from paths, in which each path is
//! resolved from the root every time.

use std::collections::{BTreeMap, VecDeque};

pub(super) type Path = String;

/// An entry of a tar.
#[derive(Debug, Clone)]
pub(super) enum Op {
    Directory { path: Path, uid: u32 },
    File { path: Path, uid: u32 },
    Symlink { path: Path, target: Path },
    Link { path: Path, target: Path },
    Whiteout { path: Path },
    Opaque { directory: Path },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Node {
    /// The owner, or `None` if no layer describes the directory.
    Directory(Option<u32>),
    /// `inode` is equal for all names of one file.
    File { uid: u32, inode: usize },
    /// `inode` is equal for all names of one symlink.
    Symlink { target: Path, inode: usize },
    /// An unresolved hard link: its index in the layer's `links`.
    Link(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refused;

/// A tree by path. The root is "", and always present.
pub(super) type Tree = BTreeMap<Path, Node>;

pub(super) fn empty() -> Tree {
    BTreeMap::from([(String::new(), Node::Directory(None))])
}

#[derive(Debug)]
pub(super) struct ModelLayer {
    tree: Tree,
    /// Order in which the names of `tree` were added.
    order: BTreeMap<Path, usize>,
    added: usize,
    whiteouts: Vec<Path>,
    opaques: Vec<Path>,
    links: Vec<Path>,
}

/// Splits a path into its directory and the name in it.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

fn join(directory: &str, name: &str) -> Path {
    if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") }
}

fn remove(tree: &mut Tree, path: &str) {
    tree.remove(path);
    clear(tree, path);
}

fn clear(tree: &mut Tree, directory: &str) {
    let prefix = if directory.is_empty() { String::new() } else { format!("{directory}/") };
    tree.retain(|path, _| path.is_empty() || !path.starts_with(&prefix));
}

/// Returns the path without symlinks of the directory at `path`. `make` is called for a name that does not exist.
fn follow(
    tree: &mut Tree,
    path: &str,
    mut make: impl FnMut(&mut Tree, &str) -> Result<(), Refused>,
) -> Result<Path, Refused> {
    let names = |path: &str| -> VecDeque<String> {
        path.split('/').filter(|it| !it.is_empty() && *it != ".").map(str::to_owned).collect()
    };
    let (mut left, mut here, mut symlinks) = (names(path), String::new(), 0);
    while let Some(name) = left.pop_front() {
        if name == ".." {
            here = split(&here).0.to_owned();
            continue;
        }
        let next = join(&here, &name);
        if !tree.contains_key(&next) {
            make(tree, &next)?;
        }
        match &tree[&next] {
            Node::Directory(_) => here = next,
            Node::Symlink { target, .. } => {
                symlinks += 1;
                if symlinks > 40 {
                    return Err(Refused);
                }
                if target.starts_with('/') {
                    here.clear();
                }
                for name in names(target).into_iter().rev() {
                    left.push_front(name);
                }
            }
            Node::File { .. } | Node::Link(_) => return Err(Refused),
        }
    }
    Ok(here)
}

fn stop(_: &mut Tree, _: &str) -> Result<(), Refused> {
    Err(Refused)
}

/// Returns the node at `path`.
fn node_at(tree: &Tree, path: &str) -> Option<Node> {
    let (directory, name) = split(path);
    let directory = follow(&mut tree.clone(), directory, stop).ok()?;
    tree.get(&join(&directory, name)).cloned()
}

impl ModelLayer {
    pub(super) fn new() -> Self {
        Self {
            tree: empty(),
            order: BTreeMap::new(),
            added: 0,
            whiteouts: Vec::new(),
            opaques: Vec::new(),
            links: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, op: &Op, inode: usize) -> Result<(), Refused> {
        let (path, node) = match op {
            Op::Whiteout { path } => {
                self.whiteouts.push(path.clone());
                return Ok(());
            }
            Op::Opaque { directory } => {
                self.opaques.push(directory.clone());
                return Ok(());
            }
            Op::Directory { path, uid } => (path, Node::Directory(Some(*uid))),
            Op::File { path, uid } => (path, Node::File { uid: *uid, inode }),
            Op::Symlink { path, target } => (path, Node::Symlink { target: target.clone(), inode }),
            Op::Link { path, .. } => (path, Node::Link(self.links.len())),
        };
        let (directory, name) = split(path);
        let Self { tree, order, added, .. } = self;
        let directory = follow(tree, directory, |tree, path| {
            *added += 1;
            order.insert(path.to_owned(), *added);
            tree.insert(path.to_owned(), Node::Directory(None));
            Ok(())
        })?;
        let path = join(&directory, name);
        let node = match op {
            Op::Link { target, .. } => match node_at(&self.tree, target) {
                Some(Node::Directory(_)) => return Err(Refused),
                Some(found) if self.tree.get(&path) == Some(&found) => return Ok(()),
                Some(found) => found,
                None => {
                    self.links.push(target.clone());
                    node
                }
            },
            _ => node,
        };
        if !(is_directory(&node) && self.tree.get(&path).is_some_and(is_directory)) {
            remove(&mut self.tree, &path);
            self.added += 1;
            self.order.insert(path.clone(), self.added);
        }
        self.tree.insert(path, node);
        Ok(())
    }

    fn resolve(&self, lower: &Tree, target: &str, steps: usize) -> Result<Node, Refused> {
        match node_at(lower, target).or_else(|| node_at(&self.tree, target)) {
            _ if steps > self.links.len() => Err(Refused),
            None | Some(Node::Directory(_)) => Err(Refused),
            Some(Node::Link(next)) => self.resolve(lower, &self.links[next], steps + 1),
            Some(file) => Ok(file),
        }
    }

    /// Returns the directory of `lower` that a whiteout in `directory` applies to.
    fn hides_in(&self, lower: &Tree, directory: &str) -> Option<Path> {
        let found = follow(&mut lower.clone(), directory, stop).ok()?;
        // If the layer itself has an entry for the path, the symlink is no longer on the path.
        let first = (1..).map_while(|count| {
            let names: Vec<&str> = directory.split('/').take(count).collect();
            (count <= directory.split('/').count()).then(|| names.join("/"))
        });
        for path in first {
            if !lower.get(&path).is_some_and(is_directory) {
                let own = self.tree.get(&path);
                let is_own = own.is_some_and(|own| *own != Node::Directory(None));
                return (!is_own).then_some(found);
            }
        }
        Some(found)
    }

    pub(super) fn onto(self, lower: &Tree) -> Result<Tree, Refused> {
        let mut names = Vec::new();
        for (path, node) in &self.tree {
            let node = match node {
                Node::Link(link) => self.resolve(lower, &self.links[*link], 0)?,
                other => other.clone(),
            };
            names.push((self.order.get(path), path, node));
        }
        names.sort_by_key(|(order, ..)| *order);

        let mut tree = lower.clone();
        let whiteouts = self.whiteouts.iter().filter_map(|path| {
            let (directory, name) = split(path);
            Some(join(&self.hides_in(lower, directory)?, name))
        });
        for path in whiteouts.collect::<Vec<_>>() {
            remove(&mut tree, &path);
        }
        for directory in self.opaques.iter().filter_map(|path| self.hides_in(lower, path)) {
            if tree.get(&directory).is_some_and(is_directory) {
                clear(&mut tree, &directory);
            }
        }

        // Names below a file or a dangling symlink come last, because the others may add the symlink's target.
        let mut postponed: Vec<&str> = Vec::new();
        let mut last = Vec::new();
        for (_, path, node) in &names {
            let is_below = postponed.iter().any(|it| path.starts_with(&format!("{it}/")));
            if is_below || !lay(&mut tree, path, node, false)? {
                postponed.push(path);
                last.push((path, node));
            }
        }
        for (path, node) in last {
            lay(&mut tree, path, node, true)?;
        }
        Ok(tree)
    }
}

/// Applies a node. If the node is an implicit directory, and another type of file exists that it may not replace,
/// changes nothing and returns false.
fn lay(tree: &mut Tree, path: &str, node: &Node, may_replace: bool) -> Result<bool, Refused> {
    let (directory, name) = split(path);
    let at = join(&follow(tree, directory, stop)?, name);
    let is_there = tree.get(&at).map(is_directory);
    match (node, is_there) {
        (Node::Directory(None), Some(true)) => return Ok(true),
        (Node::Directory(None), Some(false)) => {
            if follow(tree, path, stop).is_ok() {
                return Ok(true);
            }
            if !may_replace {
                return Ok(false);
            }
            remove(tree, &at);
        }
        (Node::Directory(_), Some(true)) => {}
        _ => remove(tree, &at),
    }
    tree.insert(at, node.clone());
    Ok(true)
}

fn is_directory(node: &Node) -> bool {
    matches!(node, Node::Directory(_))
}
