; What numba's code asks of its runtime: counted memory. A block starts with numba's MemInfo: the count, a destructor
; (0 for none), its argument, the address of the data, and their size.

target triple = "$triple"

declare ptr @malloc(i64)
declare ptr @realloc(ptr, i64)
declare void @free(ptr)

define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %wide = zext i32 %align to i64
  %extra = add i64 %wide, 64
  %total = add i64 %size, %extra
  %overflow = icmp ult i64 %total, %size
  br i1 %overflow, label %none, label %some
none:
  ret ptr null
some:
  %block = call ptr @malloc(i64 %total)
  %failed = icmp eq ptr %block, null
  br i1 %failed, label %none, label %made
made:
  %start = ptrtoint ptr %block to i64
  %beyond = add i64 %start, %extra
  %remainder = urem i64 %beyond, %wide
  %data = sub i64 %beyond, %remainder
  %pointer = inttoptr i64 %data to ptr
  store i64 1, ptr %block
  %dtor = getelementptr i64, ptr %block, i64 1
  store i64 0, ptr %dtor
  %info = getelementptr i64, ptr %block, i64 2
  store i64 0, ptr %info
  %place = getelementptr i64, ptr %block, i64 3
  store ptr %pointer, ptr %place
  %length = getelementptr i64, ptr %block, i64 4
  store i64 %size, ptr %length
  ret ptr %block
}

; The destructor of a list: it calls the destructor of the items, and gives their memory back.
define internal void @free_items(ptr %items, i64 %size, ptr %destructor) {
  %none = icmp eq ptr %destructor, null
  br i1 %none, label %free, label %call
call:
  call void %destructor(ptr %items)
  br label %free
free:
  call void @free(ptr %items)
  ret void
}

define ptr @NRT_MemInfo_new_varsize_dtor(i64 %size, ptr %destructor) {
  %items = call ptr @malloc(i64 %size)
  %block = call ptr @malloc(i64 64)
  store i64 1, ptr %block
  %dtor = getelementptr i64, ptr %block, i64 1
  store ptr @free_items, ptr %dtor
  %info = getelementptr i64, ptr %block, i64 2
  store ptr %destructor, ptr %info
  %place = getelementptr i64, ptr %block, i64 3
  store ptr %items, ptr %place
  %length = getelementptr i64, ptr %block, i64 4
  store i64 %size, ptr %length
  ret ptr %block
}

define ptr @NRT_MemInfo_varsize_realloc(ptr %block, i64 %size) {
  %place = getelementptr i64, ptr %block, i64 3
  %before = load ptr, ptr %place
  %items = call ptr @realloc(ptr %before, i64 %size)
  store ptr %items, ptr %place
  %length = getelementptr i64, ptr %block, i64 4
  store i64 %size, ptr %length
  ret ptr %items
}

define void @NRT_MemInfo_call_dtor(ptr %block) {
  %slot = getelementptr i64, ptr %block, i64 1
  %dtor = load ptr, ptr %slot
  %plain = icmp eq ptr %dtor, null
  br i1 %plain, label %free, label %call
call:
  %info_place = getelementptr i64, ptr %block, i64 2
  %info = load ptr, ptr %info_place
  %data_place = getelementptr i64, ptr %block, i64 3
  %data = load ptr, ptr %data_place
  %length = getelementptr i64, ptr %block, i64 4
  %size = load i64, ptr %length
  call void %dtor(ptr %data, i64 %size, ptr %info)
  br label %free
free:
  call void @free(ptr %block)
  ret void
}

define void @forerun_release(ptr %block) {
  %before = atomicrmw sub ptr %block, i64 1 acq_rel
  %last = icmp eq i64 %before, 1
  br i1 %last, label %free, label %kept
free:
  call void @NRT_MemInfo_call_dtor(ptr %block)
  ret void
kept:
  ret void
}
