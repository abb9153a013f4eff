#!/bin/sh
# The first process of a namespaced host (see hosts.py): its own mounts, then its own network, then sshd.
# usage: host_init.sh DIRECTORY NAME PATH…    with the PATHs of software that every host sees, read-only
set -eu
directory=$1 name=$2
shift 2

hostname "$name"
mount -t sysfs sysfs /sys # shows the network devices of the namespace that mounts it
mount --bind "$directory/etc/hosts" /etc/hosts

# The paths are set aside, then the places that hosts must not share are covered, then the paths return.
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
number=0
for path in "$@"; do
    number=$((number + 1))
    mkdir -p "/run/kept/$number"
    mount --bind "$path" "/run/kept/$number"
done
mkdir -p /run/host
mount --bind "$directory" /run/host
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /var/tmp
mount --bind /run/host/home "$HOME"
mount --bind /run/host/tmp /tmp
number=0
for path in "$@"; do
    number=$((number + 1))
    mkdir -p "$path"
    mount --bind "/run/kept/$number" "$path"
    mount -o remount,bind,ro "$path"
done

echo mounted
read -r _ # the test has given us a network device and its address
/usr/sbin/sshd -D -e -f /run/host/etc/sshd_config &
wait # and bury the orphans of this host, which fall to its first process
